"""Copy engines: they copy KV bytes between the memory of vLLM engines and the arena."""
