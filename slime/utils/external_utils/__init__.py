"""Helpers for scripts around a training run."""
