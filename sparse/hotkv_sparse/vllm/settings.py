"""Reads the settings of sparse decode and residency from vLLM's `kv_connector_extra_config`, as
`hotkv_vllm.config` reads the connector's own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from hotkv_client.arena import Arena
from hotkv_proto.errors import HotKVError
from hotkv_sparse import SparseConfig
from hotkv_sparse.centre import Centres
from hotkv_sparse.centre_file import read_centres
from hotkv_vllm.config import PREFIX, READERS, ConfigError, ConnectorConfig, flat

if TYPE_CHECKING:
    from hotkv_vllm.callbacks import CallbackEdge
    from hotkv_vllm.companion import RankCompanion, SchedulerCompanion
    from hotkv_vllm.identity.exactness import Exactness
    from hotkv_vllm.stats import HotKVStats

SPARSE = PREFIX + "sparse"
ALLOW_CUDA = PREFIX + "allow_sparse_cuda"
CENTRE = PREFIX + "sparse_centre"


@dataclass(frozen=True, slots=True)
class SparseSettings:
    """`tools/connector_settings.py` makes a part of docs/connector.md of them.

    sparse: an object that switches on sparse decode (on CUDA only with its field `residency`).
    sparse_centre: file with the model's centres, measured by `python -m
        hotkv_sparse.vllm.calibrate`. Engines share sketches only if their files are equal.
    residency_timeout_s: how long a request waits for the server to accept its blocks, before it is
        computed anew on the device, or ends with an error if it does not fit there.
    allow_sparse_cuda: use `sparse` with `residency` in CUDA engines, which have run on one GPU
        only, for minutes; without it such an engine does not start.
    sketch_tokens: on CUDA, tokens of all running contexts whose sketches have device memory.
    """

    sparse: SparseConfig
    sparse_centre: str = ""
    allow_sparse_cuda: bool = False
    sketch_tokens: int = 1 << 20
    residency_timeout_s: float = 30.0

    @property
    def is_resident(self) -> bool:
        return self.sparse.residency != "off"

    @property
    def needs_delivery(self) -> bool:
        """The steps may have read blocks that the server no longer held."""
        return self.is_resident

    @property
    def cuda_layout(self) -> str:
        """LBHNC: all blocks' pages of a layer are contiguous, as the kernels need."""
        return "LBHNC" if self.is_resident and self.allow_sparse_cuda else ""

    def scheduler(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        stats: "HotKVStats",
        exactness: "Exactness",
        edge: "CallbackEdge",
    ) -> "SchedulerCompanion":
        """Raises ConfigError if sparse decode can't work in this engine."""
        from hotkv_sparse.vllm import attention_layers
        from hotkv_sparse.vllm.scheduler.companion import SparseScheduler

        attention_layers.check_sparse(vllm_config, kv_cache_config, self.sparse)
        self.read_centres()
        return SparseScheduler(self, vllm_config, kv_cache_config, stats, exactness, edge)

    def worker(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        arena_of: Callable[[], Arena | None],
        edge: "CallbackEdge",
    ) -> "RankCompanion":
        """Also raises ConfigError if the rank lacks memory."""
        from hotkv_sparse.vllm import attention_layers
        from hotkv_sparse.vllm.worker import totals
        from hotkv_sparse.vllm.worker.companion import SparseRank

        attention_layers.check_sparse(vllm_config, kv_cache_config, self.sparse)
        centres = self.read_centres()
        if centres is not None:
            attention_layers.check_centres(vllm_config, kv_cache_config, centres)
        totals.check_memory(vllm_config, kv_cache_config, self)
        return SparseRank(vllm_config, kv_cache_config, self, centres, edge, arena_of)

    def read_centres(self) -> Centres | None:
        """Reads the file `sparse_centre`; None if the setting is empty. Raises ConfigError."""
        if not self.sparse_centre:
            return None
        try:
            return read_centres(self.sparse_centre)
        except HotKVError as error:
            raise ConfigError(f"{CENTRE} = {self.sparse_centre!r}: {error.message}") from None


def read(given: Mapping[str, Any], connector: ConnectorConfig) -> SparseSettings | None:
    """None without the setting `sparse`. Raises ConfigError.

    given: by name without `hotkv.`.
    """
    types = {field.name: str(field.type) for field in fields(SparseSettings)}
    values: dict[str, Any] = {
        name: (_read_sparse if name == "sparse" else READERS[types[name]])(PREFIX + name, value)
        for name, value in given.items()
    }
    if values.get("sparse_centre") and "sparse" not in values:
        raise ConfigError(
            f"{CENTRE} = {values['sparse_centre']!r}: it serves sparse decode only; set "
            f"{SPARSE} too, or leave it out"
        )
    if "sparse" not in values:
        return None
    found = SparseSettings(**values)
    if found.is_resident:
        _check_maps_arena(connector)
    return found


def _check_maps_arena(config: ConnectorConfig) -> None:
    """Raises ConfigError if the scheduler side can't map the arena, which residency needs."""
    why = f"with {SPARSE}.residency the engine reads the server's memory"
    if not config.target.startswith("unix:"):
        raise ConfigError(
            f"{PREFIX}target = {config.target!r}: {why}, so the server must be on this node: "
            "allowed is unix:/absolute/path"
        )
    if not config.use_table:
        raise ConfigError(f"{PREFIX}use_table = False: {why}: allowed is true")


def _read_sparse(key: str, value: Any) -> SparseConfig:
    """In the JSON object, lists stand for tuples."""
    known = {f.name for f in fields(SparseConfig)}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{key} = {value!r}: allowed is an object with some of the fields "
            f"{', '.join(sorted(known))}"
        )
    for name in value:
        if name not in known:
            raise ConfigError(
                f"{key}.{name} = {value[name]!r}: there is no such setting; allowed are "
                f"{', '.join(sorted(known))}"
            )
    settings = dict(value)
    settings = {**DEFAULTS.get(str(settings.get("residency", "off")), {}), **settings}
    if isinstance(settings.get("dense_layers"), list):
        settings["dense_layers"] = tuple(settings["dense_layers"])
    try:
        return SparseConfig(**settings)
    except HotKVError as error:
        raise ConfigError(f"{PREFIX}{error.message}") from None
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{key} = {value!r}: a value is of the wrong type ({error})") from None


DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "off": {"scorer": "mix2"},
    "auto": {"sparse_topk": 2048, "dense_layers": ()},
    "host": {"sparse_topk": 2048, "dense_layers": (), "min_context_tokens": 2048},
}
"""Other defaults than those of `SparseConfig`, by residency. With it, a budget that does not grow
with the context, all layers attend sparsely, and sketches that all engines share."""


def resident_settings(extra: Mapping[str, Any]) -> SparseConfig | None:
    """Settings of sparse decode if residency is on, else None. Raises ConfigError."""
    value = flat(extra).get(SPARSE)
    if not isinstance(value, Mapping) or value.get("residency", "off") == "off":
        return None
    return _read_sparse(SPARSE, value)


def cuda_settings(extra: Mapping[str, Any]) -> SparseConfig | None:
    """Settings of sparse decode if residency is on and allowed on CUDA, else None. Raises
    ConfigError."""
    config = resident_settings(extra)
    return config if flat(extra).get(ALLOW_CUDA) is True else None


def is_sparse_configured(extra: Mapping[str, Any]) -> bool:
    """Whether sparse decode is possible; always True for a MultiConnector, whose connectors'
    settings are not examined."""
    return SPARSE in flat(extra) or "connectors" in extra
