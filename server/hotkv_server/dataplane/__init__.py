"""Copy engines: they move KV bytes between engine memory and the arena."""
