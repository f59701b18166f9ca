"""`hotkv top`: a server's rates, live.

`figures` computes rates between two readings, `plain` and `screen` show them, `live` runs the
command.
"""
