"""slime: RL post-training for language models, exact from sample to gradient."""

__version__ = "0.1.0"
