"""Converts values to messages of the wire and back, with one module for each file of
proto/hotkv/v1.

`x_message` makes the message of a value; `read_x` reads the value of a message. Messages may come
from an untrusted sender: a wrong field raises HotKVError, whose sentence names the field and the
fix. These modules check a message only by itself. The caller checks the value against its state,
for example whether a group exists. Values that only the client or only the server converts, such as
events and the values of admin calls, are converted in the client's or the server's own code.
"""
