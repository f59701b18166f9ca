"""Parts of `bench.soak`: traffic of many sessions, and clients that mean no good."""
