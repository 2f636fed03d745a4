"""What a model is: the one reading of config.json, and the table of weight names. Trainer, engine
and converters ask here.

Imports exceptions and config; no Megatron, no engine.
"""
