"""Where numbers, messages and times of a run go: metrics.jsonl, W&B, TensorBoard, the terminal,
logs, traces.

Imports config and files; computes no metric.
"""
