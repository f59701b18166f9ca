"""How blocks lie in an engine's memory."""

from dataclasses import dataclass

from hotkv_proto.layout import PageTensor

HEADS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """`num_blocks` blocks of `layers` pages. `layout`, with B blocks, L layers, H heads, N tokens,
    C channels, K keys and values apart: `BLHNC` (a block is one run), `LBHNC` (a page is one),
    `LKBNHC` (half a page), `LHBNC` (a page's head).
    """

    page_bytes: int
    layers: int
    num_blocks: int
    layout: str

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def tensors(self) -> tuple[PageTensor, ...]:
        return tuple(self._tensor(i) for i in range(self.layers))

    def _tensor(self, layer: int) -> PageTensor:
        page, layer_bytes, slot = (
            self.page_bytes,
            self.num_blocks * self.page_bytes,
            layer * self.page_bytes,
        )
        if self.layout == "BLHNC":
            return PageTensor(0, "kv", layer * page, self.block_bytes, page, slot)
        parts = {"LBHNC": 1, "LKBNHC": 2, "LHBNC": HEADS}[self.layout]
        if parts == 1:
            return PageTensor(0, "kv", layer * layer_bytes, page, page, slot)
        run = page // parts
        return PageTensor(
            0, "kv", layer * layer_bytes, run, run, slot, ((parts, self.num_blocks * run),)
        )
