"""The modules of `bench.sparse_quality`, which compares variants of sparse decode (ways to select
blocks): a model's forward pass, texts, the KV pages of many variants, and the decode that compares
them."""
