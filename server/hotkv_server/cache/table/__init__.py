"""The index of the block table, with the server's own data about each entry."""
