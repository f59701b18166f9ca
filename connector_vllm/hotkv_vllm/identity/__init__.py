"""Which weights and adapters decide this engine's KV, which KV is exact, and the ranks'
agreement."""
