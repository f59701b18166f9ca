"""What stands before every service: peers, limits, audit."""
