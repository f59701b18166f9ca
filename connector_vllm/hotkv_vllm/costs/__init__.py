"""Whether the engine loads a hit or computes its tokens, from measured times."""
