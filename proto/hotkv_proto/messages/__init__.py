"""Values as messages of the wire: a module for each file of proto/hotkv/v1, with both directions.

`x_message` makes the message of a value; `read_x` reads the value of a message. What is read may
come from a stranger: a wrong field raises HotKVError, whose sentence names the field and the fix.
Only what the message itself shows is checked here; the caller checks it against its own state.
What one side alone makes or reads (events, pages, admin) stays with that side.
"""
