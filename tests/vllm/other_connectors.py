"""Connectors beside hotkv's in vLLM's MultiConnector."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from hotkv_vllm.connector import HotKVConnector
from hotkv_vllm.metadata import HotKVMetadata

Within = Callable[[dict[str, Any]], dict[str, Any]]


def beside(name: str, *, ours_first: bool) -> Within:
    """Makes a MultiConnector of hotkv's and this module's connector `name`."""
    other = {
        "kv_connector": name,
        "kv_connector_module_path": "tests.vllm.other_connectors",
        "kv_role": "kv_both",
    }

    def within(ours: dict[str, Any]) -> dict[str, Any]:
        children = [ours, other] if ours_first else [other, ours]
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": children},
        }

    return within


def children(connector: MultiConnector) -> tuple[HotKVConnector, Any]:
    """hotkv's first."""
    one, other = connector.sub_connectors
    return (one, other) if isinstance(one, HotKVConnector) else (other, one)


def our_connector(connector: Any) -> HotKVConnector:
    """Also in a MultiConnector."""
    return children(connector)[0] if isinstance(connector, MultiConnector) else connector


def ours(metadata: Any) -> HotKVMetadata:
    """hotkv's part of a step's metadata."""
    parts = getattr(metadata, "metadata", (metadata,))
    return next(part for part in parts if isinstance(part, HotKVMetadata))


@dataclass
class CheckedHandshake(KVConnectorHandshakeMetadata):
    rank: int


class Metadata(KVConnectorMetadata): ...


class _Connector(KVConnectorBase_V1, SupportsHMA):
    """Never offers hits, loads or stores."""

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _nothing
    update_state_after_alloc = _nothing

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Metadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None


class CheckingConnector(_Connector):
    """As NIXL's: accepts only its own handshakes and requires a layout."""

    seen: dict[tuple[int, int], Any] | None = None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return CheckedHandshake(self._vllm_config.parallel_config.rank)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        if not all(isinstance(one, CheckedHandshake) for one in metadata.values()):
            raise ValueError("CheckingConnector expects CheckedHandshake for handshake metadata.")
        self.seen = dict(metadata)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "LBHNC"


@dataclass
class Plan:
    """tokens: hits by request.
    is_async: loads don't delay their step.
    holds: loads don't end.
    fill: request id, block ids by group, number of tokens.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    is_async: bool = False
    holds: bool = False
    fails: bool = False
    fill: Callable[[str, Sequence[list[int]], int], None] = lambda *_: None
    loading: dict[str, tuple[Sequence[list[int]], int]] = field(default_factory=dict)
    invalid: set[int] = field(default_factory=set)
    num_loads: int = 0


PLAN = Plan()


class LoadingConnector(_Connector):
    """Scheduler and worker side share `PLAN`."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        tokens = PLAN.tokens.get(request.request_id, 0) - num_computed_tokens
        return (tokens, PLAN.is_async) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            tokens = PLAN.tokens.pop(request.request_id)
            PLAN.loading[request.request_id] = (blocks.get_block_ids(), tokens)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if PLAN.is_async or PLAN.holds:
            return
        for request_id, (ids, tokens) in PLAN.loading.items():
            if PLAN.fails:
                PLAN.invalid.update(ids[0][: tokens // self._vllm_config.cache_config.block_size])
            else:
                PLAN.fill(request_id, ids, tokens)
        PLAN.loading.clear()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if not PLAN.is_async or PLAN.holds or not PLAN.loading:
            return KVConnectorTransferResults()
        done = set(PLAN.loading)
        for request_id, (ids, tokens) in PLAN.loading.items():
            if not PLAN.fails:
                PLAN.fill(request_id, ids, tokens)
        PLAN.loading.clear()
        failed = done if PLAN.fails else set()
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, PLAN.invalid = PLAN.invalid, set()
        return invalid


def loads_into(one: Any) -> Callable[[str, Sequence[list[int]], int], None]:
    """A `Plan.fill` that writes what `one`'s model would compute."""

    def fill(name: str, tables: Sequence[list[int]], tokens: int) -> None:
        request = one.requests[name]
        if request.lora_request is not None:
            one.contents.setdefault(name, one.content_of(request.lora_request))
        one.tables[name] = tuple(list(ids) for ids in tables)
        one.tokens[name] = list(request.all_token_ids)
        before = one.tensors, one.salt
        for memory in one.memories:
            one.tensors, one.salt = memory
            one._write(name, 0, tokens)
        one.tensors, one.salt = before

    return fill
