"""Writes and reads recordings, all that decided a rollout; no Ray, no Megatron, no HTTP.

The rollout manager and the training ranks call it with values. Imports files, data and gate; knows
nothing of engines and ranks. Nothing here raises into a run: a recording that cannot be written
stops, with one warning.
"""
