"""Filters that keep or drop whole groups once they are scored; they change no sample."""
