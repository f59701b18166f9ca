"""Leases, retentions, loads and stores: which owner holds which entries, and until when. Pure."""
