"""Time to the first token and time of a decode step.

A prefill step computes layer after layer while the next layer's old keys and values arrive from
host memory, so it takes the longer of the two. A decode step adds up what runs one after the other:
scores decide what is pulled, and attention needs it. Reads are bytes over bandwidth, products are
operations over flops, both times the device's measured shares.
"""

from dataclasses import dataclass

import numpy as np

from hotkv_sparse.estimate.devices import Device
from hotkv_sparse.estimate.figures import Figure, human_bytes, human_seconds, rate
from hotkv_sparse.estimate.models import Model
from hotkv_sparse.estimate.plan import Mode, Plan

ALL_REDUCE_S = 1e-5
"""A sum over devices costs at least this: a guess at its latency in a graph."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """One request alone. `reread`: old keys and values that all steps fetch from host memory, by
    one device. `hiding_chunk`: tokens of a step from which on attention takes longer than that
    fetch. `limit`: what takes longest."""

    steps: Figure
    linear: Figure
    attention: Figure
    building: Figure
    overhead: Figure
    reread: Figure
    link: Figure
    hiding_chunk: Figure
    total: Figure
    limit: str


@dataclass(frozen=True, slots=True)
class Decode:
    """One step of a batch. `link`: all blocks that a step wants from host memory; `pulls`: those
    that it waits for. `limit`: the largest part."""

    linear: Figure
    attention: Figure
    scoring: Figure
    choosing: Figure
    overhead: Figure
    pulls: Figure
    link: Figure
    total: Figure
    tokens_per_s: Figure
    limit: str


def _flops(operations: float, device: Device, ratio: float, parallel: int) -> tuple[float, str]:
    """Seconds and formula of products that `parallel` devices share."""
    return (
        operations / (device.flops * ratio * parallel),
        f"{operations:.4g} operations / ({device.flops / 1e12:.4g} T/s x {ratio:.3g}"
        + (f" x {parallel} devices)" if parallel > 1 else ")"),
    )


def _read(num_bytes: float, device: Device, ratio: float) -> tuple[float, str]:
    """Seconds and formula of bytes that each device reads from its memory."""
    return (
        num_bytes / (device.bandwidth * ratio),
        f"{human_bytes(num_bytes)} / ({rate(device.bandwidth)} x {ratio:.3g})",
    )


def _moved(num_bytes: float, device: Device) -> tuple[float, str]:
    """Seconds and formula of bytes that each device gets over its link."""
    return (
        num_bytes / (device.link * device.link_ratio),
        f"{human_bytes(num_bytes)} / ({rate(device.link)} x {device.link_ratio:.3g})",
    )


def _all_reduce_s(model: Model, device: Device, plan: Plan, tokens: int) -> float:
    """Two sums over devices a layer, each of which moves 2 (n - 1) / n of its bytes (ring)."""
    parallel = plan.tensor_parallel
    if parallel == 1:
        return 0.0
    moved_bytes = 2 * (parallel - 1) / parallel * tokens * model.hidden * plan.element_bytes
    return 2 * model.layers * (moved_bytes / device.peer + ALL_REDUCE_S)


def _overhead(model: Model, device: Device, plan: Plan, tokens: int, steps: int) -> Figure:
    sums_s = _all_reduce_s(model, device, plan, tokens)
    formula = (
        f"{human_seconds(device.step_s)} + {model.layers} layers x {human_seconds(device.layer_s)}"
        + (f" + {human_seconds(sums_s)} of sums over devices" if sums_s else "")
    )
    return Figure(
        steps * (device.step_s + model.layers * device.layer_s + sums_s),
        "s",
        f"{steps} steps x ({formula})" if steps > 1 else formula,
    )


# ----------------------------------------------------------------------------------------- prefill


def prefill(model: Model, device: Device, plan: Plan, mode: Mode) -> Prefill:
    """Time to the first token of one request that has the devices to itself, without any hit.
    INVALID_FIELD if the plan does not fit the model."""
    plan.check(model)
    parallel, chunk = plan.tensor_parallel, min(plan.chunk_tokens, plan.tokens)
    old = np.arange(0, plan.tokens, chunk, dtype=np.float64)
    new = np.minimum(chunk, plan.tokens - old)
    weights_bytes = model.layers * model.layer_parameters * plan.weight_bytes / parallel
    weights_s, _ = _read(weights_bytes, device, device.weight_ratio)

    operations = 2.0 * model.layers * model.layer_parameters * new
    product_s, _ = _flops(1.0, device, device.compute_ratio, parallel)
    linear_s = np.maximum(operations * product_s, weights_s)
    pairs = new * old + new * (new + 1) / 2
    pair_operations = 4.0 * model.layers * model.query_heads * model.head_size
    pair_s, _ = _flops(pair_operations, device, device.prefill_attention_ratio, parallel)
    attention_s = pairs * pair_s
    building = _building(model, device, plan, mode)
    overhead = _overhead(model, device, plan, chunk, len(old))

    sparse_token_bytes = plan.sparse_layers(model) * plan.layer_token_bytes(model)
    moves = mode is Mode.RESIDENT
    fetched = np.maximum(old - plan.sparse.always_tokens, 0.0) * moves * sparse_token_bytes
    stored = new * moves * sparse_token_bytes
    byte_s, _ = _moved(1.0, device)
    # The link carries both ways at once.
    link_s = np.maximum(fetched, stored) * byte_s
    compute_s = linear_s + attention_s + (building.value + overhead.value) * new / plan.tokens
    total_s = float(np.maximum(compute_s, link_s).sum())
    bound = int((link_s > compute_s).sum())

    _, linear_formula = _flops(float(operations.sum()), device, device.compute_ratio, parallel)
    _, attention_formula = _flops(
        float(pairs.sum()) * pair_operations, device, device.prefill_attention_ratio, parallel
    )
    parts = {"linear": float(linear_s.sum()), "attention": float(attention_s.sum())}
    limit = (
        f"host link in {bound} of {len(old)} steps" if bound else max(parts, key=parts.__getitem__)
    )
    return Prefill(
        steps=Figure(len(old), "steps", f"{plan.tokens} tokens / {chunk}"),
        linear=Figure(
            parts["linear"],
            "s",
            f"2 x {model.layers * model.layer_parameters:,} parameters x {plan.tokens} tokens: "
            f"{linear_formula}; a step at least {human_seconds(weights_s)} for its weights",
        ),
        attention=Figure(
            parts["attention"],
            "s",
            f"4 x {model.layers} layers x {model.query_heads} heads x {model.head_size} x "
            f"{pairs.sum():.4g} pairs of tokens: {attention_formula}",
        ),
        building=building,
        overhead=overhead,
        reread=Figure(
            float(fetched.sum()),
            "bytes",
            f"sum over steps of (old tokens - {plan.sparse.always_tokens}) x "
            f"{human_bytes(sparse_token_bytes)}"
            if moves
            else "old keys and values are on the device",
        ),
        link=Figure(float(link_s.sum()), "s", _moved(float(fetched.sum()), device)[1]),
        hiding_chunk=_hiding_chunk(model, device, plan),
        total=Figure(total_s, "s", "sum over steps of max(linear + attention + rest, link)"),
        limit=limit,
    )


def _building(model: Model, device: Device, plan: Plan, mode: Mode) -> Figure:
    if mode is Mode.DENSE:
        return Figure(0.0, "s", "none")
    keys_bytes = plan.tokens * plan.sparse_layers(model) * plan.layer_token_bytes(model) / 2
    seconds, formula = _read(keys_bytes, device, device.build_ratio)
    return Figure(seconds, "s", f"keys once: {formula}")


def _hiding_chunk(model: Model, device: Device, plan: Plan) -> Figure:
    """Per old token and layer: c x 4 x heads x channels operations against its bytes."""
    rank_heads = model.query_heads / plan.tensor_parallel
    operations = 4 * rank_heads * model.head_size
    link = device.link * device.link_ratio
    return Figure(
        plan.layer_token_bytes(model)
        * device.flops
        * device.prefill_attention_ratio
        / (operations * link),
        "tokens",
        "bytes of an old token / link = tokens x 4 x heads x channels / flops",
    )


# ------------------------------------------------------------------------------------------ decode


def decode(model: Model, device: Device, plan: Plan, mode: Mode) -> Decode:
    """Time of one step in which every request of the batch gets a token. INVALID_FIELD if the plan
    does not fit the model."""
    plan.check(model)
    linear = _decode_linear(model, device, plan)
    attention = _decode_attention(model, device, plan, mode)
    chooses = mode is not Mode.DENSE and not plan.is_whole
    scoring = _scoring(model, device, plan) if chooses else Figure(0.0, "s", "none")
    choosing = _choosing(model, device, plan) if chooses else Figure(0.0, "s", "none")
    overhead = _overhead(model, device, plan, plan.batch, 1)
    pulls, link = _pulls(model, device, plan, resident=mode is Mode.RESIDENT)
    parts = {
        "linear": linear.value,
        "attention": attention.value,
        "scoring": scoring.value,
        "choosing": choosing.value,
        "overhead": overhead.value,
    }
    work_s = sum(parts.values())
    # Overlapped pulls are a part of `link`, which bounds the step.
    waits_s = work_s if plan.pulls_overlap else work_s + pulls.value
    total_s = max(waits_s, link.value)
    how = "all work" if plan.pulls_overlap else "all work + pulls"
    slowest = "host link" if link.value >= waits_s and link.value else ""
    parts["pulls"] = pulls.value
    return Decode(
        linear=linear,
        attention=attention,
        scoring=scoring,
        choosing=choosing,
        overhead=overhead,
        pulls=pulls,
        link=link,
        total=Figure(total_s, "s", f"max({how}, link)" if link.value else "all work"),
        tokens_per_s=Figure(plan.batch / total_s, "tokens/s", f"{plan.batch} / step"),
        limit=slowest or max(parts, key=parts.__getitem__),
    )


def _decode_linear(model: Model, device: Device, plan: Plan) -> Figure:
    parallel = plan.tensor_parallel
    weights_bytes = model.step_parameters * plan.weight_bytes / parallel
    read_s, read = _read(weights_bytes, device, device.weight_ratio)
    operations = 2.0 * model.step_parameters * plan.batch
    product_s, product = _flops(operations, device, device.compute_ratio, parallel)
    return Figure(max(read_s, product_s), "s", read if read_s >= product_s else product)


def _decode_attention(model: Model, device: Device, plan: Plan, mode: Mode) -> Figure:
    sparse_layers = plan.sparse_layers(model)
    attended = sparse_layers * plan.attended_tokens(mode)
    attended += (model.layers - sparse_layers) * plan.tokens
    seconds, formula = _read(
        plan.batch * attended * plan.layer_token_bytes(model), device, device.attention_ratio
    )
    return Figure(seconds, "s", f"{plan.attended_tokens(mode)} tokens attended: {formula}")


def _scoring(model: Model, device: Device, plan: Plan) -> Figure:
    num_bytes = plan.batch * plan.context_blocks * plan.block_representation_bytes(model)
    seconds, formula = _read(num_bytes, device, device.score_ratio)
    if plan.representations_on_host:
        moved_s, moved = _moved(num_bytes, device)
        if moved_s > seconds:
            return Figure(moved_s, "s", f"over the link: {moved}")
    return Figure(seconds, "s", formula)


def _choosing(model: Model, device: Device, plan: Plan) -> Figure:
    rows = 1 if device.parallel_rows else plan.batch
    layers = plan.sparse_layers(model)
    each_s = device.select_s + plan.context_blocks * device.select_block_s
    return Figure(
        rows * layers * each_s,
        "s",
        f"{layers} layers x {rows} x ({human_seconds(device.select_s)} + {plan.context_blocks} "
        f"blocks x {device.select_block_s / 1e-9:.3g} ns)",
    )


def _pulls(model: Model, device: Device, plan: Plan, *, resident: bool) -> tuple[Figure, Figure]:
    """Blocks that join hot sets: those that a step waits for, and all."""
    if not resident:
        none = Figure(0.0, "s", "all on the device")
        return none, none
    layers, missing = plan.sparse_layers(model), plan.missing_blocks()
    page_bytes = plan.block_tokens * plan.layer_token_bytes(model)
    waited = min(missing, float(plan.sparse.max_correction_blocks))
    figures = []
    for blocks, which in ((waited, f"at most {plan.sparse.max_correction_blocks}"), (missing, "")):
        seconds, formula = _moved(plan.batch * layers * blocks * page_bytes, device)
        what = f"{blocks:.3g} missing blocks a layer{', ' + which if which else ''}"
        figures.append(Figure(seconds, "s", f"{what}: {formula}"))
    return figures[0], figures[1]
