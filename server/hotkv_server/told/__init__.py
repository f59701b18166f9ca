"""What a node says of itself."""
