"""Memory shared through files (arena, block table, engine memory), and the state file beside the
arena."""
