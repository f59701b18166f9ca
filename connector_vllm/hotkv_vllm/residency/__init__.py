"""Contexts whose old blocks are in host memory: the scheduler's half and the worker's half."""
