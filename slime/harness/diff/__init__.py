"""`slime diff A B`: recordings, rollouts, parts of them, or dumps, compared field by field.

Reads files and says what differs first and why. Compares columns, not samples; only what differs is
looked at sample by sample. May know the formats of files and the field contract; knows no engine,
no rank and no run that is under way.
"""
