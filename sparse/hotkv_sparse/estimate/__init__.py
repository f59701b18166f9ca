"""Estimates the memory of sparse decode, device and host, and how many requests fit: `python -m
hotkv_sparse.estimate`. Runs no model, estimates no times; each figure has its formula."""

from hotkv_sparse.estimate.memory import Figure, Memory, memory
from hotkv_sparse.estimate.plan import DEVICES, MODELS, DeviceKind, Mode, Model, Plan, read_config

__all__ = [
    "DEVICES",
    "MODELS",
    "DeviceKind",
    "Figure",
    "Memory",
    "Mode",
    "Model",
    "Plan",
    "memory",
    "read_config",
]
