"""What reads a run's records: live view, report, comparison of dumps; no Ray, no Megatron."""
