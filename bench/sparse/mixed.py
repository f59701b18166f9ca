"""Keys coded where queries look: a calibrated code of mixed width, tried beside rot2u at its size
and below.

A model's keys and queries fill their channels unevenly. Per layer and KV head, once per model, from
one long text: x = k - mu; A = (second moment of the group's queries) ^ 1/2, so that in y = A x
every direction counts alike for the score; the principal axes of y, strongest first, split into
runs of 4, 2, 1 or 0 bits and, within a run, rotated by signs and Hadamard so that channels look
normal. A token has Lloyd-Max codes of its channels, relative to the run's calibrated rms and to one
gain of its own, and one fp16 scale, |y|² / (y · code), which keeps the norm. Reverse water-filling
in the whitened space (KLT coding; Loki, arXiv 2406.02542, is the case of 16 or 0 bits), with
rot2u's quantiser and scale.

Only quality is at stake here: `Mixed` gives the keys that its codes stand for, and packs nothing.

Shapes: H KV heads, G query heads of a group, D channels, S tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Levels of the Lloyd-Max quantiser of the normal distribution, positive half (Max 1960).
HALF_LEVELS = {
    1: (0.7979,),
    2: (0.4528, 1.510),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}
SPLITS = {
    "mix2": ((0.25, 4), (0.5, 2), (0.25, 0)),
    "mix1.5": ((0.25, 4), (0.25, 2), (0.5, 0)),
}
"""Share of the channels and bits of each; with the fp16 scale 34 and 26 bytes a token and head at
128 channels (rot2u: 34)."""
BIAS = {"mix2": 0.05, "mix1.5": 0.1}
"""Overestimate of a block's log mass in nats, subtracted from scores; measured."""
QUERY_FLOOR = 0.05
"""Share of the mean query energy that every direction gets, so that A can be inverted."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Of one layer: `key_mean` [H, D], `key_covariance` and `query_moment` (second moment of the
    group's queries) [H, D, D]."""

    key_mean: torch.Tensor
    key_covariance: torch.Tensor
    query_moment: torch.Tensor

    @staticmethod
    def of(query_QSD: torch.Tensor, keys_HSD: torch.Tensor) -> "Moments":
        """Moments of one layer's queries and keys after RoPE."""
        mean = keys_HSD.mean(dim=1)
        centred = keys_HSD - mean[:, None]
        grouped = query_QSD.unflatten(0, (len(keys_HSD), -1)).flatten(1, 2)
        covariance, moment = (
            array.transpose(1, 2) @ array / array.shape[1] for array in (centred, grouped)
        )
        return Moments(mean, covariance, moment)


def hadamard(size: int) -> torch.Tensor:
    """Orthonormal Hadamard matrix; the identity if `size` is no power of two."""
    if size & (size - 1):
        return torch.eye(size)
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


def quantised(y: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest levels."""
    half = torch.tensor(HALF_LEVELS[bits])
    levels = torch.cat([-half.flip(0), half])
    return levels[torch.bucketize(y, (levels[1:] + levels[:-1]) / 2)]


class Mixed:
    """One layer's code. `name` is one of `SPLITS`."""

    def __init__(self, name: str, moments: Moments) -> None:
        self.mean_HD = moments.key_mean
        kv_heads, head_size = self.mean_HD.shape
        self.runs: list[tuple[slice, int]] = []
        first = 0
        for share, bits in SPLITS[name]:
            self.runs.append((slice(first, first + int(share * head_size)), bits))
            first += int(share * head_size)
        signs = (
            torch.randint(0, 2, (head_size,), generator=torch.Generator().manual_seed(1)) * 2.0
            - 1.0
        )
        mixing = torch.zeros(head_size, head_size)
        for run, _ in self.runs:
            mixing[run, run] = signs[run, None] * hadamard(run.stop - run.start)
        axes = [
            _axes(moments.query_moment[head], moments.key_covariance[head])
            for head in range(kv_heads)
        ]
        self._into_HDD = torch.stack([into @ mixing for into, _ in axes])
        self._back_HDD = (
            torch.stack([back @ mixing for _, back in axes]).transpose(1, 2).contiguous()
        )
        variance_HD = (
            ((moments.key_covariance @ self._into_HDD) * self._into_HDD).sum(dim=1).clamp_min(1e-12)
        )
        self._rms_HD = torch.empty_like(variance_HD)
        for run, _ in self.runs:
            self._rms_HD[:, run] = variance_HD[:, run].mean(dim=1, keepdim=True).sqrt()

    def rebuilt(self, keys_HSD: torch.Tensor) -> torch.Tensor:
        """What the codes of keys [H, S, D] stand for: q · rebuilt is the estimate of q · k."""
        y = (keys_HSD - self.mean_HD[:, None]) @ self._into_HDD
        relative = y / self._rms_HD[:, None]
        coded = torch.cat([relative[..., run] for run, bits in self.runs if bits], dim=-1)
        gain = coded.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-12)
        code = torch.zeros_like(y)
        for run, bits in self.runs:
            if bits:
                code[..., run] = (
                    quantised(relative[..., run] / gain, bits) * self._rms_HD[:, None, run]
                )
        scale = y.square().sum(dim=-1, keepdim=True) / (y * code).sum(
            dim=-1, keepdim=True
        ).clamp_min(1e-12)
        return (scale.clamp_max(65504.0).half().float() * code) @ self._back_HDD + self.mean_HD[
            :, None
        ]


def _axes(
    query_moment_DD: torch.Tensor, covariance_DD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(A U, A^-1 U), U the principal axes of A covariance A, strongest first, A the root of the
    queries' moment."""
    floor = QUERY_FLOOR * query_moment_DD.diagonal().mean()
    values, vectors = torch.linalg.eigh(query_moment_DD + floor * torch.eye(len(query_moment_DD)))
    root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    axes = torch.linalg.eigh(root @ covariance_DD @ root)[1].flip(1)
    return root @ axes, inverse @ axes


def codes(name: str, moments_L: Sequence[Moments]) -> list[Mixed]:
    """One code per layer."""
    return [Mixed(name, moments) for moments in moments_L]
