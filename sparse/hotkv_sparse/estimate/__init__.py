"""Sizes hardware on paper: `python -m hotkv_sparse.estimate` says what a context takes in device
and host memory, and how long its first token, and each further one, takes.

Every figure carries the formula that it comes from. Rates are peaks of data sheets times measured
shares; `devices` names the source of each. Nothing here runs a model: only `here` measures
anything, and that for a second.
"""

from hotkv_sparse.estimate.devices import DEVICES, Device
from hotkv_sparse.estimate.figures import Figure
from hotkv_sparse.estimate.memory import Memory, memory
from hotkv_sparse.estimate.models import MODELS, Model, read_config
from hotkv_sparse.estimate.plan import Mode, Plan
from hotkv_sparse.estimate.times import Decode, Prefill, decode, prefill

__all__ = [
    "DEVICES",
    "MODELS",
    "Decode",
    "Device",
    "Figure",
    "Memory",
    "Mode",
    "Model",
    "Plan",
    "Prefill",
    "decode",
    "memory",
    "prefill",
    "read_config",
]
