"""Users' functions: called within a time limit, what they raise named, what they return checked.

Imports exceptions and data; which functions there are is slime.config.extension_points' business.
"""
