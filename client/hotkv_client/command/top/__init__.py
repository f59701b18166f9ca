"""`hotkv top`: a server's rates, live.

`figures` asks the server and computes rates between two readings, `plain` and `screen` show them,
`live` runs on the terminal.
"""
