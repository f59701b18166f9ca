"""Access control: who a peer is, for which tenants it may act, who may see the status page, and
which files and paths may be trusted."""
