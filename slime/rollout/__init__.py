"""From prompts to scored groups: generation, rewards, filters; no Ray, no Megatron."""
