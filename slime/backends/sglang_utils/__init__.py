"""Engines that run elsewhere, and the router in front of engines; no torch, no Megatron."""
