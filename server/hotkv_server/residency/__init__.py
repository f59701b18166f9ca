"""Residencies: requests whose blocks stay in the arena as long as they run."""
