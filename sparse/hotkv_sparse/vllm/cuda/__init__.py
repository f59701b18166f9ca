"""Attention of CUDA engines."""
