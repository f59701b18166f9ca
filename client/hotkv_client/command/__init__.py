"""The command `hotkv`: asks a server through the admin API and prints the answers."""
