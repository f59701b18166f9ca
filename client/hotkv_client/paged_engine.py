"""An engine without vLLM, for tests and benchmarks with a real server. Its KV memory is a file
that the server maps."""

import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np

from hotkv_client.session import Session
from hotkv_client.types import EngineMemory, Evicted, LinkState, Role, SessionConfig
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor


class PagedEngine:
    """A CPU engine's KV cache in layout `LBHNC`, and its worker session.

    windows: tokens of each group's sliding window; 0: full attention. All groups use the same
        memory, so a block belongs to one at a time.
    layers: of each group.
    kv: uint8 [layers, blocks, page bytes], shared with the server.
    """

    def __init__(
        self,
        target: str,
        *,
        layers: int = 2,
        num_blocks: int = 64,
        page_bytes: int = 4096,
        model: str = "paged-engine",
        tenant: str = "",
        engine_id: str = "engine",
        engine_name: str = "",
        model_names: Sequence[str] = (),
        block_tokens: int = 16,
        windows: Sequence[int] = (0,),
        shard_index: int = 0,
        num_shards: int = 1,
        on_evicted: Callable[[Evicted], None] | None = None,
        reconnect_max_s: float = 0.5,
        on_state: Callable[[LinkState, str], None] | None = None,
    ) -> None:
        layer_bytes = num_blocks * page_bytes
        self.fd = os.memfd_create("hotkv-engine")
        os.posix_fallocate(self.fd, 0, layers * layer_bytes)
        self.kv = np.frombuffer(mmap.mmap(self.fd, layers * layer_bytes), np.uint8).reshape(
            layers, num_blocks, page_bytes
        )
        tensors = tuple(
            PageTensor(group, "kv", i * layer_bytes, page_bytes, page_bytes, i * page_bytes)
            for group in range(len(windows))
            for i in range(layers)
        )
        self.layout = Layout(
            shard_index, num_blocks, (MemoryHandle("kv", layers * layer_bytes),), tensors, "LBHNC"
        )
        groups = tuple(
            GroupSpec(
                GroupKind.SLIDING_WINDOW if window else GroupKind.FULL_ATTENTION,
                block_tokens,
                (layers * page_bytes,) * num_shards,
                window,
            )
            for window in windows
        )
        self.key_space = KeySpace(model, model, "bfloat16", groups, block_tokens, tenant=tenant)
        config = SessionConfig(
            target,
            engine_id,
            Role.WORKER,
            self.key_space,
            engine_name=engine_name,
            model_names=tuple(model_names),
            on_evicted=on_evicted,
            on_state=on_state,
            reconnect_initial_s=min(0.1, reconnect_max_s),
            reconnect_max_s=reconnect_max_s,
        )
        self.session = Session(config, EngineMemory(self.layout, {"kv": self.fd}))

    def connect(self, timeout_s: float = 20.0) -> "PagedEngine":
        """Raises TimeoutError if the session is not connected after `timeout_s`."""
        self.session.start()
        if not self.session.wait_connected(timeout_s):
            raise TimeoutError(f"not connected within {timeout_s} s: {self.session!r}")
        return self

    def close(self) -> None:
        self.session.close()
        os.close(self.fd)
