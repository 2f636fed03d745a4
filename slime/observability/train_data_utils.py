"""Upstream's later path of slime.files.train_dump_utils."""

from slime.files.train_dump_utils import restore_context_parallel_fields_to_cpu, save_debug_train_data

__all__ = ["restore_context_parallel_fields_to_cpu", "save_debug_train_data"]
