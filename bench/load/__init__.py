"""Modules shared by `bench.soak` and `bench.multi_turn`: clients, conversations, engines and
caches."""
