"""Copy engines: what moves KV bytes between engine memory and the arena."""
