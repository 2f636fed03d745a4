"""A batch on its way: samples become columns, columns are split over ranks, a rank's share becomes
its local batch.

Pure functions from values to values. Imports exceptions, config and the small helpers of utils; no
Ray, no HTTP, no Megatron.
"""
