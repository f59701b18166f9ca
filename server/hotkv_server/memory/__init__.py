"""The files that the server maps, and the state file."""
