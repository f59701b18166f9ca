"""`hotkv top`: a server's rates, live. `readings` asks the server, `figures` computes rates between
two readings (pure), `plain` and `screen` show them, `keys` and `live` are the terminal."""
