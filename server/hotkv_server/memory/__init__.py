"""Memory shared through files: the arena, the block table, engine memory."""
