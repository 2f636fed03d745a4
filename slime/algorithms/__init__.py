"""Advantages, losses, KL and corrections on tensors; no Ray, no Megatron, no HTTP."""
