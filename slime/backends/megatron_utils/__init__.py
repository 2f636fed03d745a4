"""The trainer: Megatron-core's model, step, checkpoints and weight updates; no prompts, no rewards."""
