"""`hotkv top`: shows a server's rates, live.

`figures` asks the server and computes rates between two readings. `plain` and `screen` show these
rates. `live` runs the command on the terminal.
"""
