"""Access control: who a peer (the other end of a connection) is, for which tenants it may act,
single-use tickets, access to the status page, and checks of files and paths before a server starts.
"""
