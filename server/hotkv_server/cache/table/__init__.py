"""Entries: the index, its shared table, and the server's data about each block. Pure."""
