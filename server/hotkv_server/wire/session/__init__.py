"""The stream of a session: its opening, its calls, its answers."""
