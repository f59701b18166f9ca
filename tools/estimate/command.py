"""`python -m tools.estimate --model qwen2.5-14b --tokens 1000000 --device h200`: prints
figures with their formulas, as text or JSON."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hotkv_proto.errors import HotKVError
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.formats import FORMATS
from tools.estimate.memory import Figure, Memory, figures_of, human_bytes, memory
from tools.estimate.plan import (
    DEVICES,
    DTYPE_BYTES,
    HERE,
    MODELS,
    DeviceKind,
    Mode,
    Model,
    Plan,
    default_sparse,
    device_named,
    model_named,
    read_config,
    refuse,
)

USAGE_ERROR = 2
_USUAL_PLAN = Plan(tokens=1)
NO_TIMES = "memory only: times return when a GPU has been measured"

SUMMARY: tuple[tuple[str, Callable[[Memory], Figure]], ...] = (
    ("a request on the device", lambda taken: taken.request),
    ("a request in host memory", lambda taken: taken.host_request),
    ("largest batch", lambda taken: taken.largest_batch),
)


# --------------------------------------------------------------------------------- the command line


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(
        prog="python -m tools.estimate",
        description=(
            "Estimates the memory of a context: device and host memory, largest batch. Each "
            "figure is printed with its formula. It estimates no times."
        ),
    )
    what = flags.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="NAME", help=f"one of {', '.join(MODELS)}")
    what.add_argument(
        "--config", type=Path, metavar="PATH", help="a Hugging Face config.json, or its folder"
    )
    flags.add_argument("--tokens", type=int, required=True, help="context of a request")
    flags.add_argument(
        "--device",
        required=True,
        metavar="NAME",
        help=f"one of {', '.join(DEVICES)}, or {HERE}: this machine",
    )
    flags.add_argument(
        "--device-memory", type=float, metavar="GIB", help="in place of the table's figure"
    )
    flags.add_argument(
        "--mode",
        choices=[mode.value for mode in Mode],
        action="append",
        help="only this one; may be repeated (default: all)",
    )
    flags.add_argument("--json", action="store_true", help="print JSON instead of text")
    _add_plan_flags(flags.add_argument_group("the case"))
    _add_sparse_flags(flags.add_argument_group("sparse decode, as in hotkv.sparse"))
    return flags.parse_args(arguments)


def _add_plan_flags(flags: argparse._ArgumentGroup) -> None:
    usual = _USUAL_PLAN
    flags.add_argument(
        "--batch", type=int, default=usual.batch, help="requests that decode at once"
    )
    flags.add_argument("--block-tokens", type=int, default=usual.block_tokens)
    flags.add_argument(
        "--chunk-tokens",
        type=int,
        default=usual.chunk_tokens,
        help="of a prefill step: vLLM's max_num_batched_tokens",
    )
    flags.add_argument("--tensor-parallel", type=int, default=usual.tensor_parallel)
    flags.add_argument("--dtype", default=usual.dtype, help=f"one of {', '.join(DTYPE_BYTES)}")
    flags.add_argument(
        "--weight-bits", type=int, default=usual.weight_bits, help="of quantised weights: 4 or 8"
    )
    flags.add_argument(
        "--memory-ratio",
        type=float,
        default=usual.memory_ratio,
        help="share of the device that vLLM may use: its gpu_memory_utilization",
    )
    flags.add_argument("--host-memory", type=float, metavar="GIB", help="bounds the largest batch")
    flags.add_argument(
        "--staging-layers",
        type=int,
        default=usual.staging_layers,
        help="layers of context that a prefill assembles at a time; 2 overlap copy and attention",
    )


def _add_sparse_flags(flags: argparse._ArgumentGroup) -> None:
    sparse = default_sparse()
    flags.add_argument(
        "--sparse-topk",
        type=_count_or_share,
        default=sparse.sparse_topk,
        metavar="K",
        help="a whole number counts tokens, a fraction is a share of the context",
    )
    flags.add_argument("--scorer", default=sparse.scorer, help=f"one of {', '.join(FORMATS)}")
    flags.add_argument("--sink-tokens", type=int, default=sparse.sink_tokens)
    flags.add_argument("--recent-tokens", type=int, default=sparse.recent_tokens)
    flags.add_argument("--dense-layers", type=int, nargs="*", default=list(sparse.dense_layers))
    flags.add_argument(
        "--sketches", choices=("device", "host"), default="device", help="where they lie"
    )


def _count_or_share(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def model_of(chosen: argparse.Namespace) -> Model:
    """Raises OSError if the config can't be read, INVALID_FIELD."""
    return model_named(chosen.model) if chosen.config is None else read_config(chosen.config)


def device_of(chosen: argparse.Namespace) -> DeviceKind:
    """Raises INVALID_FIELD."""
    device = device_named(chosen.device)
    if chosen.device_memory is None:
        return device
    return device.with_memory(_bytes("device-memory", chosen.device_memory))


def _bytes(name: str, gib: float) -> int:
    if not 0 < gib * (1 << 30) < 1e18:
        raise refuse(name, gib, "use GiB above 0")
    return int(gib * (1 << 30))


def plan_of(chosen: argparse.Namespace) -> Plan:
    """Raises INVALID_FIELD."""
    host = chosen.host_memory
    return Plan(
        tokens=chosen.tokens,
        batch=chosen.batch,
        block_tokens=chosen.block_tokens,
        sparse=SparseConfig(
            sparse_topk=chosen.sparse_topk,
            scorer=chosen.scorer,
            sink_tokens=chosen.sink_tokens,
            recent_tokens=chosen.recent_tokens,
            dense_layers=tuple(chosen.dense_layers),
            min_context_tokens=0,
        ),
        sketches_on_host=chosen.sketches == "host",
        chunk_tokens=chosen.chunk_tokens,
        staging_layers=chosen.staging_layers,
        tensor_parallel=chosen.tensor_parallel,
        dtype=chosen.dtype,
        weight_bits=chosen.weight_bits,
        memory_ratio=chosen.memory_ratio,
        host_memory_bytes=None if host is None else _bytes("host-memory", host),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for bad input."""
    chosen = options(arguments)
    try:
        model, plan = model_of(chosen), plan_of(chosen)
        plan.check(model)
        device = device_of(chosen)
        modes = {
            mode: memory(model, device, plan, mode)
            for mode in Mode
            if chosen.mode is None or mode.value in chosen.mode
        }
    except HotKVError as error:
        print(error.message, file=sys.stderr)
        return USAGE_ERROR
    except OSError as error:
        print(f"{error.filename}: {error.strerror}; name a readable --config", file=sys.stderr)
        return USAGE_ERROR
    if chosen.json:
        print(json.dumps(as_json(model, device, plan, modes), indent=1))
    else:
        print(as_text(model, device, plan, modes))
    return 0


# --------------------------------------------------------------------------------------- the report


def as_text(model: Model, device: DeviceKind, plan: Plan, modes: Mapping[Mode, Memory]) -> str:
    """A table with a column per mode, then each mode's figures."""
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
    """Figures that are not zero."""
    for name, figure in found.items():
        if figure.value:
            yield f"  {name:24}{figure!s:>16}  = {figure.formula}"


def as_json(
    model: Model, device: DeviceKind, plan: Plan, modes: Mapping[Mode, Memory]
) -> dict[str, object]:
    return {
        "model": dataclasses.asdict(model) | {"parameters": model.parameters},
        "device": dataclasses.asdict(device),
        "plan": dataclasses.asdict(plan),
        "modes": {mode.value: _mode_json(taken) for mode, taken in modes.items()},
    }


def _mode_json(taken: Memory) -> dict[str, object]:
    figures = {name: dataclasses.asdict(figure) for name, figure in figures_of(taken).items()}
    return {"memory": figures, "fits": _fits(taken)}
