"""Answers of a hot set: blocks that may be attended, blocks to copy before that. Values only."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]


class SlotState(IntEnum):
    """State of a hot slot."""

    FREE = 0
    MAPPED = 1
    LOADING = 2
    READY = 3
    CANCELLED = 4


@dataclass(frozen=True, slots=True)
class HotMap:
    """Blocks that may be attended: `blocks` int32, ascending, and their `slots` int32. Read-only;
    `version` grows with every change."""

    version: int
    blocks: I32
    slots: I32


@dataclass(frozen=True, slots=True)
class SlotMoves:
    """Blocks to copy from host memory into hot slots before the map is used, and the blocks that
    lost theirs. int32 arrays."""

    blocks: I32
    slots: I32
    victims: I32


@dataclass(frozen=True, slots=True)
class Step:
    """A layer's part of one decode step: carry out `load`, attend to all of `map`, hand
    `prefetch` (int32, heaviest first) on.

    `num_selected`, `num_resident`: candidates selected, and how many of them were resident before;
    always kept blocks are not counted.
    """

    map: HotMap
    load: SlotMoves
    prefetch: I32
    num_selected: int
    num_resident: int


@dataclass(frozen=True, slots=True)
class Growth:
    """`new`: slots for the blocks that the context gained, for the engine to fill; `swap_out`:
    complete blocks to copy to host memory."""

    new: SlotMoves
    swap_out: I32
