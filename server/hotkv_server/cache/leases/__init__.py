"""Which leases, loads, stores and retentions pin or reserve which blocks, and until when."""
