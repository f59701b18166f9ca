"""Estimates hardware sizes on paper: `python -m hotkv_sparse.estimate`.

It computes the device and host memory of a context, and how many contexts fit. It estimates memory,
not time: no GPU has been measured. Every figure carries its formula. It runs no model.
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
