"""Estimates how much memory sparse decode needs: `python -m hotkv_sparse.estimate`.

The estimate consists of the device and host memory of a request, and the number of requests that
fit into a device. It does not run a model and does not estimate times. The report shows each figure
with its formula.
"""

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
