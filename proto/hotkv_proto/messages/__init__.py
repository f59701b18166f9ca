"""Converts values to messages of the wire and back, a module per file of proto/hotkv/v1.

`x_message` makes a message, `read_x` reads one. Senders are not trusted: a wrong field raises
HotKVError, whose sentence names field and fix. A message is checked only by itself; the caller
compares it with its state. What only the client or only the server converts is in their own
code.
"""
