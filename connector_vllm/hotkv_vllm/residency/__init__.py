"""Contexts whose old blocks are in host memory: both sides of it."""
