"""A rank's part, whatever its device."""
