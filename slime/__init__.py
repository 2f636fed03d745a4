"""RL post-training for language models, exact from sample to gradient; loads nothing by itself."""

__version__ = "0.1.0"
