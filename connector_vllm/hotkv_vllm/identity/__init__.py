"""The identity of everything that decides the bytes of a block in this engine, and the ranks'
agreement on it."""
