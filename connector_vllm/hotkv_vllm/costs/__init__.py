"""When a hit is worth its time."""
