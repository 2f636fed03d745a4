"""Publishes the trained weights to the engines; trains nothing."""

from slime.backends.megatron_utils.update_weight.gather import iter_hf_weight_buckets

__all__ = ["iter_hf_weight_buckets"]
