"""One request in a worker of a resident engine: where its blocks are, and what its hot slots hold.

What is always true: a block that is not on the device has an address in a mapped arena, or the
sequence is lost; a hot slot of a layer holds the page of the position that `content` names.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hotkv_client.arena import Arena
from hotkv_client.types import ResidencyOpened

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
NOT_KEPT = -1
_FIRST_BLOCKS = 64


@dataclass(slots=True, eq=False)
class ResidentSequence:
    """See the module. By position of the context: `addresses` int64, of the block's slot in this
    process, -1 if the server doesn't keep it as far as is known; `representations` int64 likewise;
    `rows` int32, of `KeptRows`.

    `num_kept`: by layer, leading blocks whose representation is in its row. `num_freed`: blocks
    from the sinks up to here are not on the device. `content`: by layer index, the position that
    each of `hot_blocks` holds. `pins`: what the addresses are read under, with the mapping.
    """

    request_id: str
    first_block: int = 0
    may_outgrow: bool = False
    num_freed: int = 0
    hot_blocks: I32 = field(default_factory=lambda: np.empty(0, np.int32))
    addresses: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    representations: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    rows: I32 = field(default_factory=lambda: np.empty(0, np.int32))
    num_kept: dict[int, int] = field(default_factory=dict)
    content: dict[int, I32] = field(default_factory=dict)
    pin: ResidencyOpened | None = None
    arenas: list[Arena] = field(default_factory=list)
    is_lost: bool = False
    has_read: bool = False

    def kept(self, first: int, slots: I64, representations: I64) -> None:
        """Sets the addresses int64 [n] of blocks from `first` on, and of their representations; -1
        for none."""
        stop = first + len(slots)
        if stop > len(self.addresses):
            more = max(stop, 2 * len(self.addresses), _FIRST_BLOCKS) - len(self.addresses)
            nothing = np.full(more, NOT_KEPT, np.int64)
            self.addresses = np.concatenate([self.addresses, nothing])
            self.representations = np.concatenate([self.representations, nothing])
        self.addresses[first:stop] = slots
        self.representations[first:stop] = representations

    def hot_content(self, layer_idx: int) -> I32:
        """The position that each hot slot of a layer holds, -1 for none; may be written."""
        content = self.content.get(layer_idx)
        if content is None or len(content) != len(self.hot_blocks):
            content = self.content[layer_idx] = np.full(len(self.hot_blocks), -1, np.int32)
        return content

    def still_holds(self) -> bool:
        """Whether what was read from the arenas was pinned when it was read."""
        pin = self.pin
        return not self.has_read or (
            pin is not None and all(arena.holds(pin) for arena in self.arenas)
        )
