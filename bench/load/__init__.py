"""Parts of `bench.soak` and `bench.multi_turn`: clients, conversations, engines and caches."""
