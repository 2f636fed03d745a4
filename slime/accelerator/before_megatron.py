"""Import this before Megatron-core in a process that is about to train: Megatron is then imported
ready for this device.

`initialize.init` prepares it in any case; imported this way, it also takes a third of the CPU time
to import (no compiler).
"""

from slime.accelerator import get_accelerator

get_accelerator().prepare_megatron()
