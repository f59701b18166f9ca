"""Bounds of the wire that both sides hold."""

MAX_MESSAGE_BYTES = 4 << 20
"""Of a message to the server: a stream whose message is longer ends, so clients send several."""
