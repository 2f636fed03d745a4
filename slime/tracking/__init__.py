"""Where numbers, messages and times of a run go; computes no metric; no Ray.

Imports config and files; computes no metric.
"""
