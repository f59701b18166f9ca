"""The command `hotkv`: what it asks, and how it shows the answers."""
