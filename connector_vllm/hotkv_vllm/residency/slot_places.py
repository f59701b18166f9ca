"""Where the bytes of one rank lie in the arena's slots: pages of a block by layer, and
representations by layer and format.

A slot holds the shards of all ranks in order. A shard of a block holds the pages of the group's
layers as vLLM names them; a shard of a representation holds all sparse layers in the model's order,
of each its formats in the order that the configuration names them (`shared`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hotkv_vllm.sparse.batch import SparseLayer


@dataclass(frozen=True, slots=True)
class SlotPlaces:
    """`pages`: by layer index, bytes from a block's slot to the layer's page. `representations`:
    by layer index and format, bytes from the representation's slot."""

    pages: dict[int, int] = field(default_factory=dict)
    representations: dict[int, dict[str, int]] = field(default_factory=dict)


def slot_places(
    layers: Sequence[SparseLayer], layer_names: Sequence[str], shard_index: int
) -> SlotPlaces:
    """The places of a rank whose group has the layers `layer_names`, all of them among `layers`."""
    by_name = {layer.name: layer for layer in layers}
    shard_bytes = sum(by_name[name].pages.page_bytes for name in layer_names)
    places = SlotPlaces()
    at = shard_index * shard_bytes
    for name in layer_names:
        places.pages[by_name[name].index] = at
        at += by_name[name].pages.page_bytes
    ordered = sorted(layers, key=lambda layer: layer.index)
    row_bytes = [
        (layer, name, layer.shape.row_bytes(name))
        for layer in ordered
        for name in layer.shape.formats
    ]
    at = shard_index * sum(num_bytes for _, _, num_bytes in row_bytes)
    for layer, name, num_bytes in row_bytes:
        places.representations.setdefault(layer.index, {})[name] = at
        at += num_bytes
    return places
