"""Upstream's paths of what is in metrics, tracking and files: doors; they define nothing."""
