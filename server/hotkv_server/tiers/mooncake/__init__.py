"""A shared tier in Mooncake Store. Its native client may crash, or hang if the store is down, so
it runs in child processes: a killed one can't touch slots. All else is `tiers.remote`."""
