"""What a model is, from one reading of config.json, and its weights' names; no Megatron.

Trainer, engine and converters ask here. Imports exceptions only; no Megatron, no engine.
"""
