"""Which weights and LoRA adapters decide this engine's KV, when they change, which KV is exact,
and how the ranks agree on one key space."""
