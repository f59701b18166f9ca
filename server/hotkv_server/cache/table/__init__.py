"""Entries: the index, its shared table, and what is known of each block. Pure."""
