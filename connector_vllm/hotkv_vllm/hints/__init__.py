"""What requests ask of the cache."""
