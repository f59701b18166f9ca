"""Devices: what the server asks of CUDA, and who answers."""
