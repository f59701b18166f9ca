"""Memory shared through files (arena, block table, engine memory), its limits, and the state file
beside the arena."""
