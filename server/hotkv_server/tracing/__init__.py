"""Records spans of the server's work, if the settings ask for traces."""
