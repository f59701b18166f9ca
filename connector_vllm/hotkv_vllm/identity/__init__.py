"""Identifies the weights and LoRA adapters that decide the bytes of this engine's blocks, and
notices when they change. Tracks which KV is exact (computed with the present weights and dense
attention, so that it may be stored). Lets the ranks agree on one key space (a model in a
configuration)."""
