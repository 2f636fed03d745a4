"""Helpers for scripts around a training run; no run imports them."""
