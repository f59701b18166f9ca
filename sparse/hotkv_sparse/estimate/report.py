"""An estimate as text, every figure with its formula, and as JSON."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from hotkv_sparse.estimate.devices import Device
from hotkv_sparse.estimate.figures import Figure, figures_of, human_bytes
from hotkv_sparse.estimate.memory import Memory
from hotkv_sparse.estimate.models import Model
from hotkv_sparse.estimate.plan import Mode, Plan

NO_TIMES = "memory only: times return when a GPU has been measured"

SUMMARY: tuple[tuple[str, Callable[[Memory], Figure]], ...] = (
    ("a request on the device", lambda taken: taken.request),
    ("a request in host memory", lambda taken: taken.host_request),
    ("largest batch", lambda taken: taken.largest_batch),
)


def as_text(model: Model, device: Device, plan: Plan, modes: Mapping[Mode, Memory]) -> str:
    """A table of the modes side by side, then each mode's figures with their formulas."""
    lines = [
        f"{model.name} ({model.parameters / 1e9:.3g}B parameters), {plan.tokens:,} tokens, batch "
        f"{plan.batch}, on {plan.tensor_parallel} x {device.name}",
        f"{device.name}: {human_bytes(device.memory_bytes)} ({device.source})",
        NO_TIMES,
        "",
        *_table(modes),
    ]
    for mode, taken in modes.items():
        fits = "" if _fits(taken) else "; does not fit the device"
        lines += ["", f"== {mode.value}: {_MEANING[mode]}{fits}", *_figures(figures_of(taken))]
    return "\n".join(lines)


_MEANING = {
    Mode.DENSE: "all KV on the device and attended",
    Mode.SPARSE: "all KV on the device, the hot set attended",
    Mode.RESIDENT: "all KV in host memory, sinks, window and hot slots on the device",
}


def _table(modes: Mapping[Mode, Memory]) -> Iterator[str]:
    yield f"{'':32}" + "".join(f"{mode.value:>16}" for mode in modes)
    for title, figure_of in SUMMARY:
        cells = [str(figure_of(taken)).removesuffix(" requests") for taken in modes.values()]
        yield f"{title:32}" + "".join(f"{cell:>16}" for cell in cells)


def _fits(taken: Memory) -> bool:
    return taken.device.value <= taken.device_limit.value


def _figures(found: dict[str, Figure]) -> Iterator[str]:
    """Those that are not zero: a mode without staging need not say so."""
    for name, figure in found.items():
        if figure.value:
            yield f"  {name:24}{figure!s:>16}  = {figure.formula}"


def as_json(
    model: Model, device: Device, plan: Plan, modes: Mapping[Mode, Memory]
) -> dict[str, object]:
    """The same for programs: plain numbers in the units of the text, formulas beside them."""
    return {
        "model": dataclasses.asdict(model) | {"parameters": model.parameters},
        "device": dataclasses.asdict(device),
        "plan": dataclasses.asdict(plan),
        "modes": {mode.value: _mode_json(taken) for mode, taken in modes.items()},
    }


def _mode_json(taken: Memory) -> dict[str, object]:
    figures = {name: dataclasses.asdict(figure) for name, figure in figures_of(taken).items()}
    return {"memory": figures, "fits": _fits(taken)}
