"""Records spans of the server's work, if traces are asked for."""
