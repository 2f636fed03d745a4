"""Compares recordings, their parts, and dumps, and names the first cause; runs nothing it reads.

Columns are compared, not samples; only what differs is looked at sample by sample. May know the
formats of files and the field contract; knows no engine, no rank and no run that is under way.
"""
