"""Samples become columns, shards and a rank's local batch; no Ray, no HTTP, no Megatron.

Pure functions from values to values. Imports exceptions, config and the small helpers of utils; no
Ray, no HTTP, no Megatron.
"""
