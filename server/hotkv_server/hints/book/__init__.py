"""Records the outcomes of hints, and changes blocks in parts. Pure."""
