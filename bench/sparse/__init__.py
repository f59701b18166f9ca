"""The modules of `bench.sparse_quality`: a model's forward pass, texts, the KV pages of many
variants, and the decode that compares them."""
