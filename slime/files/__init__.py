"""Every file format that slime writes and reads, and the atomic writer; no Ray, no HTTP.

Imports exceptions, config and data; knows nothing of gates, metrics, engines or ranks.
"""
