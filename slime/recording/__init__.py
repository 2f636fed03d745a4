"""A recording: everything that decided each rollout of a run, in files that other tools read.

May know the formats of files, samples, the gate's verdicts and batches. May not know Ray, Megatron
or an engine: the rollout manager and the training ranks call it with values. Nothing here raises
into a run: a recording that cannot be written stops, with one warning.
"""
