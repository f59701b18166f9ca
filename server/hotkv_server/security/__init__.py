"""Access control: peers and their proofs, tenants, one-time tickets, and checks of files and paths
before a server starts."""
