"""Device and host memory of a plan in one mode. A device holds weights, activations and staging
once, and for each request its KV and sketches; what remains limits the batch."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from tools.estimate.plan import DeviceKind, Mode, Model, Plan

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


# ------------------------------------------------------------------------------------------ figures


@dataclass(frozen=True, slots=True)
class Figure:
    """`unit`: "bytes", or a plural such as "requests". `formula`: with the numbers."""

    value: float
    unit: str
    formula: str

    def __str__(self) -> str:
        if self.unit == "bytes":
            return human_bytes(self.value)
        return f"{self.value:,.0f} {self.unit}"


def figures_of(owner: "DataclassInstance") -> dict[str, Figure]:
    """Fields that are `Figure`s."""
    found = {item.name: getattr(owner, item.name) for item in fields(owner)}
    return {name: value for name, value in found.items() if isinstance(value, Figure)}


def human_bytes(value: float) -> str:
    """In the largest binary unit that gives at least 1."""
    for unit in _BINARY[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_BINARY[-1]}"


# ------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device; but `host_request` and `host` are host memory of all ranks, and
    `largest_batch` counts requests.

    staging: where a prefill assembles its context (RESIDENT).
    room: left for requests.
    kv_token: of a token in all layers.
    request_kv, request_sketches: the parts of `request`.
    device: of the whole batch, which fits up to `device_limit`.
    largest_batch: that fits device and host.
    """

    weights: Figure
    activations: Figure
    staging: Figure
    room: Figure
    kv_token: Figure
    request_kv: Figure
    request_sketches: Figure
    request: Figure
    device: Figure
    device_limit: Figure
    host_request: Figure
    host: Figure
    largest_batch: Figure


def memory(model: Model, device: DeviceKind, plan: Plan, mode: Mode) -> Memory:
    """Raises INVALID_FIELD if the plan does not fit the model."""
    plan.check(model)
    parallel = plan.tensor_parallel
    weights = Figure(
        model.parameters * plan.weight_bytes / parallel,
        "bytes",
        f"{model.parameters:,} parameters x {plan.weight_bytes:g} bytes{_over(parallel)}",
    )
    activations = _activations(model, plan)
    kv_token = Figure(
        model.layers * plan.layer_token_bytes(model),
        "bytes",
        f"2 x {model.layers} layers x {plan.rank_kv_heads(model)} KV heads x {model.head_size} x "
        f"{plan.element_bytes} bytes",
    )
    staging = _staging(model, plan, mode)
    usable_bytes = device.memory_bytes * plan.memory_ratio
    room = Figure(
        usable_bytes - weights.value - activations.value - staging.value,
        "bytes",
        "device limit - weights - activations - staging",
    )
    request_kv = _request_kv(model, plan, mode)
    sketches = _sketches(model, plan, mode)
    request = Figure(request_kv.value + sketches.value, "bytes", "keys and values + sketches")
    host_request = _host_request(model, plan, mode)
    return Memory(
        weights=weights,
        activations=activations,
        staging=staging,
        room=room,
        kv_token=kv_token,
        request_kv=request_kv,
        request_sketches=sketches,
        request=request,
        device=Figure(
            weights.value + activations.value + staging.value + plan.batch * request.value,
            "bytes",
            f"weights + activations + staging + {plan.batch} x request",
        ),
        device_limit=Figure(
            usable_bytes, "bytes", f"{human_bytes(device.memory_bytes)} x {plan.memory_ratio:g}"
        ),
        host_request=host_request,
        host=Figure(plan.batch * host_request.value, "bytes", f"{plan.batch} x request on host"),
        largest_batch=_largest_batch(plan, room, request, host_request),
    )


def _over(parallel: int) -> str:
    return f" / {parallel} devices" if parallel > 1 else ""


def _activations(model: Model, plan: Plan) -> Figure:
    """Rough upper bound: a layer's widest activations for a step's tokens, and the logits."""
    parallel = plan.tensor_parallel
    tokens = max(plan.chunk_tokens, plan.batch)
    wide = 6 * model.hidden + 3 * model.intermediate / parallel
    logits_bytes = 4 * plan.batch * model.vocab / parallel
    return Figure(
        tokens * wide * plan.element_bytes + logits_bytes,
        "bytes",
        f"{tokens} tokens x (6 x {model.hidden} + 3 x {model.intermediate}{_over(parallel)}) x "
        f"{plan.element_bytes} bytes + 4 x {plan.batch} x {model.vocab} logits",
    )


def _staging(model: Model, plan: Plan, mode: Mode) -> Figure:
    """`staging_layers` layers of the context, and a step's new blocks until they are stored;
    only for RESIDENT."""
    layer_bytes = plan.layer_token_bytes(model)
    if mode is not Mode.RESIDENT:
        return Figure(0.0, "bytes", "attention reads its pages in place")
    chunk = min(plan.chunk_tokens, plan.tokens)
    return Figure(
        plan.staging_layers * plan.tokens * layer_bytes + chunk * model.layers * layer_bytes,
        "bytes",
        f"{plan.staging_layers} layers x {plan.tokens} tokens x {human_bytes(layer_bytes)} + "
        f"{chunk} new tokens x {model.layers} x {human_bytes(layer_bytes)}",
    )


def _request_kv(model: Model, plan: Plan, mode: Mode) -> Figure:
    page_bytes = plan.block_tokens * plan.layer_token_bytes(model)
    if mode is not Mode.RESIDENT:
        return Figure(
            model.layers * plan.context_blocks * page_bytes,
            "bytes",
            f"{model.layers} layers x {plan.context_blocks} blocks x {human_bytes(page_bytes)}",
        )
    hot, dense = plan.sparse_layers(model), model.layers - plan.sparse_layers(model)
    whole = f" + {dense} dense layers x {plan.context_blocks} blocks" if dense else ""
    return Figure(
        (hot * plan.hot_blocks + dense * plan.context_blocks) * page_bytes,
        "bytes",
        f"({hot} layers x ({plan.always_blocks} blocks of sinks and window + "
        f"{plan.hot_blocks - plan.always_blocks} hot slots){whole}) x {human_bytes(page_bytes)}",
    )


def _sketches(model: Model, plan: Plan, mode: Mode) -> Figure:
    if mode is Mode.DENSE:
        return Figure(0.0, "bytes", "none")
    block_bytes = plan.block_sketch_bytes(model)
    if plan.sketches_on_host:
        return Figure(0.0, "bytes", "in host memory")
    return Figure(
        plan.context_blocks * block_bytes,
        "bytes",
        f"{plan.context_blocks} blocks x {human_bytes(block_bytes)} in "
        f"{plan.sparse_layers(model)} layers",
    )


def _host_request(model: Model, plan: Plan, mode: Mode) -> Figure:
    """RESIDENT: context and sketches; SPARSE with `sketches_on_host`: sketches; else 0."""
    on_host = mode is Mode.RESIDENT or (mode is Mode.SPARSE and plan.sketches_on_host)
    if not on_host:
        return Figure(0.0, "bytes", "none needed")
    whole = plan.with_(tensor_parallel=1)
    kv_bytes = plan.block_tokens * model.kv_token_bytes(plan.element_bytes)
    if mode is Mode.SPARSE:
        kv_bytes = 0
    block_bytes = whole.block_sketch_bytes(model)
    return Figure(
        plan.context_blocks * (kv_bytes + block_bytes),
        "bytes",
        f"{plan.context_blocks} blocks x ({human_bytes(kv_bytes)} + {human_bytes(block_bytes)} of "
        "sketches)",
    )


def _largest_batch(plan: Plan, room: Figure, request: Figure, host_request: Figure) -> Figure:
    fitting, formula = room.value // request.value, "room / request"
    if plan.host_memory_bytes is not None and host_request.value:
        on_host = plan.host_memory_bytes // host_request.value
        if on_host < fitting:
            fitting, formula = on_host, f"{human_bytes(plan.host_memory_bytes)} / request on host"
    return Figure(max(0.0, fitting), "requests", formula)
