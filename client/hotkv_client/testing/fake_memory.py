"""The engine's memory as the double of the server reaches it: through the layout, byte by byte."""

import os
from collections.abc import Iterator, Mapping

import numpy as np

from hotkv_client.types import SessionConfig
from hotkv_proto.groups import GroupSpec
from hotkv_proto.keys import Representation
from hotkv_proto.layout import Layout


class FakeMemory:
    """Memory of one session; without a layout it has none, and only the groups' shapes."""

    def __init__(
        self, config: SessionConfig, layout: Layout | None, fds: Mapping[str, int]
    ) -> None:
        self._config = config
        self._layout = layout
        self.maps = {
            name: np.memmap(os.fdopen(os.dup(fd), "r+b"), np.uint8, "r+")
            for name, fd in fds.items()
        }

    def shape(self, group: int) -> GroupSpec | Representation:
        """The group, or the representation that this session declares after the groups."""
        groups = self._config.key_space.groups
        return (
            groups[group]
            if group < len(groups)
            else self._config.representations[group - len(groups)]
        )

    def number(self, group: int) -> int:
        """What the server keeps it under: the group's index, and for representations what no other
        version has."""
        shape = self.shape(group)
        return (
            self._config.key_space.representation_salt(shape)
            if isinstance(shape, Representation)
            else group
        )

    def shard(self) -> int:
        """The shard that this engine holds."""
        return self._layout.shard_index if self._layout is not None else 0

    def _runs(self, group: int, block: int) -> Iterator[tuple[str, int, int, int]]:
        assert self._layout is not None
        spec = self.shape(group)
        shard_start = sum(spec.shard_bytes[: self._layout.shard_index])
        for runs in self._layout.copy_runs(
            group, spec, np.array([block], np.int64), np.array([-shard_start], np.int64)
        ):
            yield from zip(
                [runs.handle_id] * len(runs.num_bytes),
                runs.engine_offsets.tolist(),
                runs.slot_offsets.tolist(),
                runs.num_bytes.tolist(),
                strict=True,
            )

    def read(self, group: int, block: int) -> bytes:
        """The bytes of a block's shard."""
        data = bytearray(self.shape(group).shard_bytes[self.shard()])
        for handle, engine, slot, size in self._runs(group, block):
            data[slot : slot + size] = self.maps[handle][engine : engine + size].tobytes()
        return bytes(data)

    def copy(self, group: int, block: int, data: bytes) -> int:
        """Writes a block's shard; returns how many bytes that is."""
        for handle, engine, slot, size in self._runs(group, block):
            self.maps[handle][engine : engine + size] = np.frombuffer(
                data[slot : slot + size], np.uint8
            )
        return len(data)
