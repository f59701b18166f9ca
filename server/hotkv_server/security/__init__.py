"""Who may do what: peers and their proofs, tenants, one-time tickets, and what must be true of
files before a server starts."""
