"""What a rollout asks: prompt files, datasets, chat templates, masks of conversations, tokenizers,
evaluation sets.

Imports config, data and files; knows nothing of engines or ranks.
"""
