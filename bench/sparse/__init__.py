"""The modules of `bench.sparse_quality`: a forward pass, texts, KV pages of many variants, and
the decode that compares them."""
