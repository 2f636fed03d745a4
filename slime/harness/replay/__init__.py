"""Runs a stage of a recorded rollout again, from its recorded input; it writes only a new recording.

The stages run through the functions that a run uses. What comes out is a recording of its own,
which the diff compares with the one that was read.
"""
