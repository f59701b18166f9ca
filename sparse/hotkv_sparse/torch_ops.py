"""Scoring in torch: the functions of `scores` and `weights` for tensors on any device.

The same bytes, formulas and integers as the numpy references, so results differ by float rounding
only. Nothing here waits for the device; only what the caller reads back does. Import this module
only if torch is installed.

Shapes: Q query heads, H KV heads, D channels, C channels with padding, P parts, S scored blocks, N
bytes of a block and head, T tokens.
"""

import functools

import torch

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse import formats
from hotkv_sparse.formats import Format
from hotkv_sparse.rotation import passes, signs

_CHUNK_BLOCKS = 4096
"""Blocks unpacked at once: codes take sixteen times their packed memory while they are
multiplied."""


@functools.lru_cache(maxsize=64)
def _rotation_matrix(head_size: int, device: torch.device) -> torch.Tensor:
    """float32 [D, D]: x @ matrix is `rotation.rotate(x)`; one product is faster than butterflies
    for a step's few queries."""
    y = torch.eye(head_size, dtype=torch.float32)
    for (start, size), sign in zip(
        passes(head_size), torch.from_numpy(signs(head_size).copy()), strict=True
    ):
        part = y[:, start : start + size] * sign[start : start + size]
        half = 1
        while half < size:
            pairs = part.reshape(head_size, size // (2 * half), 2, half)
            part = torch.stack(
                (pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2
            ).reshape(head_size, size)
            half *= 2
        y[:, start : start + size] = part * size**-0.5
    return y.to(device)


@functools.lru_cache(maxsize=64)
def _levels(form: Format, device: torch.device) -> torch.Tensor:
    return torch.tensor(form.levels, dtype=torch.float32, device=device)


def score(
    name: str,
    query_QD: torch.Tensor,
    packed_SHN: torch.Tensor,
    mu_HD: torch.Tensor | None = None,
    scale: float | None = None,
    bias: float | None = None,
) -> torch.Tensor:
    """Scores float32 [Q, S] of representations uint8 [S, H, N] (index the pool first); see
    `hotkv_sparse.scores.score`.

    INVALID_FIELD on bad shapes.
    """
    form = _without_axes(name)
    bias = form.bias if bias is None else bias
    num_heads, head_size = query_QD.shape
    if not len(packed_SHN):
        return torch.empty((num_heads, 0), dtype=torch.float32, device=query_QD.device)
    kv_heads = packed_SHN.shape[1]
    if packed_SHN.dtype != torch.uint8 or num_heads % kv_heads:
        raise HotKVError(
            Reason.INVALID_FIELD,
            (
                f"representations are {packed_SHN.dtype} {list(packed_SHN.shape)}; {num_heads} "
                "query "
                "heads don't fit"
            ),
        )
    scale = head_size**-0.5 if scale is None else scale
    query = query_QD.float()
    shift = torch.full((num_heads, 1), -bias, dtype=torch.float32, device=query.device)
    if mu_HD is not None:
        shift = (
            shift
            + (query * mu_HD.float().repeat_interleave(num_heads // kv_heads, dim=0)).sum(
                dim=1, keepdim=True
            )
            * scale
        )
    x_QD = query @ _rotation_matrix(head_size, query.device) if form.bits else query
    peak = x_QD.abs().amax(dim=1, keepdim=True).clamp_min(1e-20)
    steps = torch.round(x_QD * (127.0 / peak)).reshape(kv_heads, -1, head_size)
    factor = peak * (scale / (127.0 * (form.level_unit if form.bits else 1.0)))
    scored = [
        (_token_scores if form.bits else _part_scores)(form, steps, some_SHN, factor)
        for some_SHN in packed_SHN.split(_CHUNK_BLOCKS)
    ]
    return torch.cat(scored, dim=1) + shift


def _without_axes(name: str) -> Format:
    form = formats.format_named(name)
    if form.by_axes:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"torch knows no {name}; use hotkv_sparse.representations and scores",
        )
    return form


def _token_scores(
    form: Format, steps_HGD: torch.Tensor, packed_SHN: torch.Tensor, factor_Q1: torch.Tensor
) -> torch.Tensor:
    codes, sigma = unpack_tokens(form.name, packed_SHN, steps_HGD.shape[-1])
    levels = _levels(form, packed_SHN.device)[codes.long()]
    # Products of small integers: exact in float32.
    products = torch.einsum("shtd,hgd->hgst", levels, steps_HGD).flatten(0, 1)
    sigma_QST = sigma.permute(1, 0, 2).repeat_interleave(steps_HGD.shape[1], dim=0)
    scores = torch.where(sigma_QST >= 0, products * sigma_QST * factor_Q1[:, :, None], -torch.inf)
    return torch.logsumexp(scores, dim=-1)


def unpack_tokens(
    name: str, packed_SHN: torch.Tensor, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [S, H, T, D] and sigma float32 [S, H, T] of a token format, T a multiple of 16;
    sigma < 0 if there is no token."""
    form = formats.format_named(name)
    channels, step = formats.padded_channels(form, head_size), formats.run_bytes(form, head_size)
    runs = packed_SHN.reshape(*packed_SHN.shape[:2], packed_SHN.shape[2] // step, step)
    low_bytes = 4 * channels
    codes = _unpack_lines(runs[..., :low_bytes], 2)
    if form.bits == 3:
        codes = codes | (_unpack_lines(runs[..., low_bytes : step - 32], 1) << 2)
    sigma = runs[..., step - 32 :].contiguous().view(torch.float16).float()
    return codes[..., :head_size].flatten(2, 3), sigma.flatten(2, 3)


def _unpack_lines(data: torch.Tensor, width: int) -> torch.Tensor:
    planes = 8 // width
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=data.device)[:, None]
    lines = data.reshape(
        *data.shape[:-1], data.shape[-1] // formats.LINE_BYTES, formats.RUN_TOKENS, 4
    ).movedim(-2, -3)
    codes = (lines[..., None, :] >> shifts) & ((1 << width) - 1)
    return codes.reshape(*data.shape[:-1], formats.RUN_TOKENS, lines.shape[-2] * planes * 4)


def _part_scores(
    form: Format, steps_HGD: torch.Tensor, packed_SHN: torch.Tensor, factor_Q1: torch.Tensor
) -> torch.Tensor:
    head_size = steps_HGD.shape[-1]
    channels = formats.padded_channels(form, head_size)
    codes = (
        packed_SHN[..., : form.parts * channels]
        .reshape(*packed_SHN.shape[:2], form.parts, channels)[..., :head_size]
        .float()
        - 128.0
    )
    scale_SHP = packed_SHN[..., form.parts * channels :].contiguous().view(torch.float32)
    parts = [steps_HGD]
    if form.name == "quest":
        parts = [steps_HGD.clamp_min(0), steps_HGD.clamp_max(0)]
    products = torch.einsum("shpd,hgpd->hgsp", codes, torch.stack(parts, dim=2))
    sums = torch.einsum("hgsp,shp->hgs", products, scale_SHP).flatten(0, 1)
    absent = (scale_SHP[..., 0] < 0).T.repeat_interleave(steps_HGD.shape[1], dim=0)
    return torch.where(absent, -torch.inf, sums * factor_Q1)


def aggregate(
    scores_QS: torch.Tensor, always_log_mass_Q: torch.Tensor, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(per_head [H, S], shared [S], always [H]), float32: shares of the attention mass; see
    `hotkv_sparse.weights.aggregate`."""
    total = torch.logsumexp(torch.cat([scores_QS, always_log_mass_Q[:, None]], dim=1), dim=1)
    total = torch.where(torch.isfinite(total), total, 0.0)
    share = torch.exp(scores_QS - total[:, None])
    per_head = share.reshape(kv_heads, len(share) // kv_heads, scores_QS.shape[1]).mean(dim=1)
    always = torch.exp(always_log_mass_Q - total).reshape(kv_heads, -1).mean(dim=1)
    return per_head, per_head.mean(dim=0), always


def top(priority_S: torch.Tensor, count: int) -> torch.Tensor:
    """The indices of the `count` largest priorities, int64, ascending; of equals the lowest.
    Ordered like `hotkv_sparse.topk.top`."""
    if count >= len(priority_S):
        return torch.arange(len(priority_S), device=priority_S.device)
    order = torch.sort(
        torch.where(priority_S > 0, priority_S, 0.0), descending=True, stable=True
    ).indices
    return torch.sort(order[:count]).values


def build_token_format(
    name: str, keys_BTHD: torch.Tensor, mu_HD: torch.Tensor | None = None
) -> torch.Tensor:
    """Representations uint8 [B, H, N] of whole blocks of keys [B, T, H, D] of any float type; see
    `hotkv_sparse.representations.build`.

    Float rounding may move a channel that lies between two levels; its score is as good.
    """
    form = _without_axes(name)
    if not form.bits:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"{name} is no token format; build it with hotkv_sparse.representations",
        )
    num_blocks, block_tokens, kv_heads, head_size = keys_BTHD.shape
    if not num_blocks:
        return torch.empty(
            (0, kv_heads, formats.head_bytes(name, block_tokens, head_size)),
            dtype=torch.uint8,
            device=keys_BTHD.device,
        )
    x = keys_BTHD.float() if mu_HD is None else keys_BTHD.float() - mu_HD.float()
    runs, channels = formats.num_runs(block_tokens), formats.padded_channels(form, head_size)
    missing = runs * formats.RUN_TOKENS - block_tokens
    rotated = (x @ _rotation_matrix(head_size, x.device)).permute(0, 2, 1, 3)
    y = torch.nn.functional.pad(rotated, (0, channels - head_size, 0, missing))
    energy = y.square().sum(dim=-1)
    rms = (energy / head_size).sqrt()
    levels = _levels(form, x.device)
    thresholds = (levels[1:] + levels[:-1]) / (2.0 * form.level_unit)
    codes = torch.zeros(y.shape, dtype=torch.uint8, device=x.device)
    for threshold in thresholds:
        codes += y > (threshold * rms)[..., None]
    product = (y * levels[codes.long()]).sum(dim=-1)
    sigma = torch.where(product > 0, energy / product * form.level_unit, 0.0).clamp_max(65504.0)
    sigma[..., block_tokens:] = formats.NO_TOKEN
    codes = codes.reshape(num_blocks, kv_heads, runs, formats.RUN_TOKENS, channels)
    sigma = sigma.reshape(num_blocks, kv_heads, runs, formats.RUN_TOKENS).half()
    lines = [_pack_lines(codes & 3, 2)]
    if form.bits == 3:
        lines.append(_pack_lines(codes >> 2, 1))
    return torch.cat([*lines, sigma.view(torch.uint8)], dim=-1).reshape(
        num_blocks, kv_heads, runs * formats.run_bytes(form, head_size)
    )


def _pack_lines(codes: torch.Tensor, width: int) -> torch.Tensor:
    lead, planes = codes.shape[:-2], 8 // width
    num_lines = codes.shape[-1] // (4 * planes)
    codes = codes.reshape(*lead, formats.RUN_TOKENS, num_lines, planes, 4)
    packed = torch.zeros_like(codes[..., 0, :])
    for plane in range(planes):
        packed |= codes[..., plane, :] << (plane * width)
    return packed.movedim(-3, -2).reshape(*lead, num_lines * formats.LINE_BYTES)
