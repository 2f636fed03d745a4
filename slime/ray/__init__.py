"""The actors of a run, where they run, and what they are asked; computes no loss, no reward."""
