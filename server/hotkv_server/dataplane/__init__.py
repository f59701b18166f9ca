"""Copy engines: copy KV between the memory of engines and the arena."""
