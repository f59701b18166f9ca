"""Clients, conversations, engines and caches of `bench.soak` and `bench.multi_turn`."""
