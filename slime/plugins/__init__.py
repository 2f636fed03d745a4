"""Calls users' functions: times them, names errors, checks results; no torch, no Ray.

Imports exceptions and data; which functions there are is slime.config.extension_points' business.
"""
