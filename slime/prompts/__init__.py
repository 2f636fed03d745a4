"""What a rollout asks: prompt files, chat templates, masks, evaluation sets; no Megatron.

Imports config, data and files; knows nothing of engines or ranks.
"""
