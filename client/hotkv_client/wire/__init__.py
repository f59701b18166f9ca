"""The wire of the client: the only modules that see its messages."""
