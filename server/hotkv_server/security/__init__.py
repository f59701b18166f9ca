"""Access control: peers and their proofs, tenants, single-use tickets, and checks of files and
paths before a server starts."""
