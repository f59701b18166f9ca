"""Stand-ins for parts of hotkv and of the machine, which fail on demand."""
