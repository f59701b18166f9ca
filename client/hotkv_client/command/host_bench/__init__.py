"""`hotkv bench`: what hotkv does on this machine, in a minute. `own_server` starts a server beside
whatever runs, `measures` times it, `report` says what the figures mean. No server in use is asked
for anything."""
