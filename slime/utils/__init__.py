"""Upstream's paths: small helpers, and doors to where the code lives; a door defines nothing."""
