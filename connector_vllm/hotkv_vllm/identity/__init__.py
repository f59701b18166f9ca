"""What decides the bytes of a block in this engine, and that the ranks agree on it."""
