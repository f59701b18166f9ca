"""The files that the server maps into its memory (arena, block table, memory of engines), and the
state file, which lists the key spaces for the next server."""
