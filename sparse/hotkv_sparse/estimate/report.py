"""An estimate as text, every figure with its formula, and as JSON."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hotkv_sparse.estimate.devices import Device
from hotkv_sparse.estimate.figures import Figure, figures_of, human_bytes, rate
from hotkv_sparse.estimate.memory import Memory, memory
from hotkv_sparse.estimate.models import Model
from hotkv_sparse.estimate.plan import Mode, Plan
from hotkv_sparse.estimate.times import Decode, Prefill, decode, prefill


@dataclass(frozen=True, slots=True)
class Sized:
    """One mode. `largest`: a step of the largest batch that fits; None if not even one does."""

    mode: Mode
    memory: Memory
    prefill: Prefill
    decode: Decode
    largest: Decode | None


def sized(model: Model, device: Device, plan: Plan, mode: Mode) -> Sized:
    """Memory and times of a mode; INVALID_FIELD if the plan does not fit the model."""
    taken = memory(model, device, plan, mode)
    batch = int(taken.largest_batch.value)
    return Sized(
        mode,
        taken,
        prefill(model, device, plan, mode),
        decode(model, device, plan, mode),
        decode(model, device, plan.with_(batch=batch), mode) if batch else None,
    )


SUMMARY: tuple[tuple[str, Callable[[Sized], Figure | None]], ...] = (
    ("a request on the device", lambda one: one.memory.request),
    ("a request in host memory", lambda one: one.memory.host_request),
    ("largest batch", lambda one: one.memory.largest_batch),
    ("time to first token", lambda one: one.prefill.total),
    ("time per token", lambda one: one.decode.total),
    ("time per token, largest batch", lambda one: one.largest.total if one.largest else None),
    ("tokens/s, largest batch", lambda one: one.largest.tokens_per_s if one.largest else None),
)


def as_text(model: Model, device: Device, plan: Plan, modes: list[Sized]) -> str:
    """A table of the modes side by side, then each mode's figures with their formulas."""
    lines = [
        f"{model.name} ({model.parameters / 1e9:.3g}B parameters), {plan.tokens:,} tokens, batch "
        f"{plan.batch}, on {plan.tensor_parallel} x {device.name}",
        f"{device.name}: {human_bytes(device.memory_bytes)}, {rate(device.bandwidth)}, "
        f"{device.flops / 1e12:.4g} Tflop/s, {rate(device.link)} from host memory",
        f"({device.source})",
        "",
        *_table(modes),
        "",
        *_limits(modes),
    ]
    for one in modes:
        lines += ["", f"== {one.mode.value}: {_MEANING[one.mode]}"]
        lines += ["memory:", *_figures(figures_of(one.memory))]
        lines += ["first token:", *_figures(figures_of(one.prefill))]
        lines += ["step:", *_figures(figures_of(one.decode))]
    return "\n".join(lines)


_MEANING = {
    Mode.DENSE: "all KV on the device and attended",
    Mode.SPARSE: "all KV on the device, the hot set attended",
    Mode.RESIDENT: "all KV in host memory, sinks, window and hot slots on the device",
}


def _table(modes: list[Sized]) -> Iterator[str]:
    yield f"{'':32}" + "".join(f"{one.mode.value:>16}" for one in modes)
    for title, figure_of in SUMMARY:
        cells = [figure_of(one) for one in modes]
        yield f"{title:32}" + "".join(f"{_short(cell):>16}" for cell in cells)


def _short(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    return str(figure).removesuffix(" requests").removesuffix(" tokens/s")


def _limits(modes: list[Sized]) -> Iterator[str]:
    for one in modes:
        fits = (
            ""
            if one.memory.device.value <= one.memory.device_limit.value
            else ("; does not fit the device")
        )
        yield (
            f"{one.mode.value}: first token limited by {one.prefill.limit}, step by "
            f"{one.decode.limit}{fits}"
        )


def _figures(found: dict[str, Figure]) -> Iterator[str]:
    """Those that are not zero: a mode without staging need not say so."""
    for name, figure in found.items():
        if figure.value:
            yield f"  {name:24}{figure!s:>16}  = {figure.formula}"


def as_json(model: Model, device: Device, plan: Plan, modes: list[Sized]) -> dict[str, object]:
    """The same for programs: plain numbers in the units of the text, formulas beside them."""
    return {
        "model": dataclasses.asdict(model) | {"parameters": model.parameters},
        "device": dataclasses.asdict(device),
        "plan": dataclasses.asdict(plan),
        "modes": {one.mode.value: _mode_json(one) for one in modes},
    }


def _mode_json(one: Sized) -> dict[str, object]:
    found: dict[str, object] = {
        title: {name: dataclasses.asdict(figure) for name, figure in part.items()}
        for title, part in (
            ("memory", figures_of(one.memory)),
            ("first_token", figures_of(one.prefill)),
            ("step", figures_of(one.decode)),
        )
    }
    found["first_token_limit"], found["step_limit"] = one.prefill.limit, one.decode.limit
    found["fits"] = one.memory.device.value <= one.memory.device_limit.value
    found["largest_batch_step"] = one.largest and {
        name: dataclasses.asdict(figure) for name, figure in figures_of(one.largest).items()
    }
    return found
