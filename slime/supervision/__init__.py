"""Notices which process of a run has died or is frozen; no Ray, no torch.

Imports files and tracking; ends and replaces nothing by itself but a frozen process.

records     a process's entry in the folder of the watch
heart       the thread in each process that beats and says the phase
processes   what /proc tells about a process
stillness   when a process counts as frozen
stacks      the Python stacks of a frozen process
watch       the thread in the driver that names who has died or frozen
"""
