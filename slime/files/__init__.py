"""Files: every format that slime writes and reads, and the one way to write a file whole.

Imports exceptions, config and data; knows nothing of gates, metrics, engines or ranks.
"""
