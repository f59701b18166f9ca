"""Sizes hardware on paper: `python -m hotkv_sparse.estimate` says what a context takes in device
and host memory, and how many of them fit.

It estimates memory, not time: no GPU has been measured. Every figure carries the formula that it
comes from. Nothing here runs a model.
"""

from hotkv_sparse.estimate.memory import Figure, Memory, memory
from hotkv_sparse.estimate.plan import DEVICES, MODELS, Device, Mode, Model, Plan, read_config

__all__ = [
    "DEVICES",
    "MODELS",
    "Device",
    "Figure",
    "Memory",
    "Mode",
    "Model",
    "Plan",
    "memory",
    "read_config",
]
