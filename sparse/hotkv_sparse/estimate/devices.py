"""Devices as arithmetic needs them: peaks of data sheets, shares of them that programs reach, and
costs that do not shrink with the work.

GPU figures come from data sheets and publications: none of them was measured with hotkv. Those of
`here` were (`bench/estimate.py`).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from hotkv_sparse.estimate.figures import check_count, check_number, refuse

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Device:
    """One device and its link to host memory. INVALID_FIELD if a figure makes no sense.

    `bandwidth`: bytes a second of device memory; `flops`: dense bf16 operations a second; `link`:
    bytes a second from host memory, one way; `peer`: bytes a second to other devices, one way, for
    tensor parallelism. Each `…_ratio` is the share of its peak that a program reaches: `weight_` of
    bandwidth when a step reads the weights, `attention_` of bandwidth when it reads keys and
    values, `score_` of bandwidth when it scores representations, `build_` of bandwidth when a
    prefill makes representations of its keys, `compute_` of flops in matrix products,
    `prefill_attention_` of flops in the attention of a prefill, `link_` of the link.

    Fixed costs, in seconds: `step_s` a step, `layer_s` a step and layer, `select_s` a layer of
    sparse decode, `select_block_s` each block that is chosen from. `parallel_rows`: one launch
    serves all requests of a batch, so that these two do not grow with it.
    """

    name: str
    source: str
    memory_bytes: int
    bandwidth: float
    flops: float
    link: float
    peer: float
    weight_ratio: float = 0.85
    attention_ratio: float = 0.8
    score_ratio: float = 0.5
    build_ratio: float = 0.05
    compute_ratio: float = 0.65
    prefill_attention_ratio: float = 0.55
    link_ratio: float = 0.86
    step_s: float = 1e-3
    layer_s: float = 1e-5
    select_s: float = 2e-5
    select_block_s: float = 6e-10
    parallel_rows: bool = True

    def __post_init__(self) -> None:
        check_count("device.memory_bytes", self.memory_bytes)
        for name in ("bandwidth", "flops", "link", "peer"):
            check_number(f"device.{name}", getattr(self, name))
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name.endswith("_ratio"):
                check_number(f"device.{item.name}", value, most=10.0)
            if item.name.endswith("_s") and not 0.0 <= value < float("inf"):
                raise refuse(f"device.{item.name}", value, "use seconds from 0 up")

    def with_(self, changes: Mapping[str, object]) -> "Device":
        """The device with some fields replaced, checked again."""
        known = {item.name for item in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise refuse("device", name, f"has no such field; use {', '.join(sorted(known))}")
        source = f"{self.source}; {', '.join(changes)} as given" if changes else self.source
        return dataclasses.replace(self, source=source, **changes)  # type: ignore[arg-type]


# Peaks: NVIDIA's data sheets, dense (sheets print twice that, "with sparsity"). Memory is what
# nvidia-smi shows, not the name's decimal gigabytes. PCIe 4.0 and 5.0 x16: 32 and 64 GB/s one way.
#
# Shares, where a source is known; a GPU run replaces them (`bench/estimate.py` has the place):
#   weight_ratio           a device copy on an H200 reaches 4.3 of 4.8 TB/s (docs/sparse.md)
#   attention_ratio        guess below that: paged reads
#   score_ratio            .4 to .65 of a copy by counting instructions (docs/sparse.md, "On CUDA")
#   build_ratio            .1 to .5 us a token over 48 layers of 8 heads by counting (same place):
#                          98 KB of keys in .5 us are 200 GB/s
#   compute_ratio          47 us of prefill a token for a 14B model (same place): .63 of 989 TFLOP/s
#   prefill_attention_ratio  FlashAttention-3's paper has up to .75 on an H100 for long causal
#                          prefills, FlashAttention-2 about .7 of an A100; paged is slower
#   link_ratio             55 of 64 GB/s (RESIDENCY.md)
#   select_s, select_block_s  seven launches in a graph; `choose` takes 40 us for 2^16 blocks, by
#                          counting (same place)
#   step_s, layer_s        guesses: scheduling beside the graph, launches within it
_PCIE4, _PCIE5 = 32e9, 64e9

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            "a100-40g", "NVIDIA A100 data sheet, SXM4", 40 * GIB, 1.555e12, 312e12, _PCIE4, 3e11
        ),
        Device(
            "a100-80g", "NVIDIA A100 data sheet, SXM4", 80 * GIB, 2.039e12, 312e12, _PCIE4, 3e11
        ),
        # No data sheet of NVIDIA's has it. RFC #37263 does.
        Device(
            "a100-96g",
            "the device of RFC #37263: 96 decimal GB, rates of the 80 GB A100 SXM4 assumed",
            96 * 10**9,
            2.039e12,
            312e12,
            _PCIE4,
            3e11,
        ),
        Device(
            "h100", "NVIDIA H100 data sheet, SXM5", 81559 << 20, 3.35e12, 989e12, _PCIE5, 4.5e11
        ),
        Device(
            "h200", "NVIDIA H200 data sheet, SXM5", 143771 << 20, 4.8e12, 989e12, _PCIE5, 4.5e11
        ),
        Device("b200", "NVIDIA HGX B200 data sheet", 183359 << 20, 8e12, 2.25e15, _PCIE5, 9e11),
        Device("l40s", "NVIDIA L40S data sheet", 46068 << 20, 8.64e11, 362e12, _PCIE4, _PCIE4),
        Device(
            "gh200",
            "NVIDIA GH200 data sheet: 96 GB of HBM3, NVLink-C2C to the processor's memory",
            97871 << 20,
            4e12,
            989e12,
            4.5e11,
            4.5e11,
        ),
    )
}


def device_named(name: str) -> Device:
    """The table's device, or INVALID_FIELD."""
    if name not in DEVICES:
        raise refuse("device", name, f"use one of {', '.join(DEVICES)}, or here for this machine")
    return DEVICES[name]
