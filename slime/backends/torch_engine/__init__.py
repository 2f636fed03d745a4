"""The embedded engine: generation in torch behind SGLang's HTTP API; no Megatron."""
