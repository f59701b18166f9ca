"""Leases, retentions, loads and stores: who holds which entries, and until when. Pure."""
