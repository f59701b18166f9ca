"""The command `hotkv`: asks the server and shows the answers."""
