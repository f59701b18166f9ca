"""Sparse decode in the server: records sequences (contexts that are decoded sparsely), selects the
blocks to which decode steps attend, and sums the counters that engines report for each layer."""
