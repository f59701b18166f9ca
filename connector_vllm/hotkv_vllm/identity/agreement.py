"""What the ranks of an engine have to agree on before it shares KV, read off their handshakes.

What is always true: an engine shares only if every rank has said what it found, all are on the
scheduler's machine, and their key spaces are one. Raises Unsupported else, with the reason that the
engine's log gives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hotkv_client.fence import Revocations
from hotkv_proto.keys import KeySpace, Representation
from hotkv_vllm.compat import Unsupported, checks
from hotkv_vllm.identity.ranks import this_host
from hotkv_vllm.link import logger
from hotkv_vllm.metadata import HotKVHandshake


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks have said. `sparse_layers`: (layer, vLLM's group). `revocations`: None if
    workers revoke their stores."""

    space: KeySpace
    kinds: tuple[Representation, ...]
    sparse_layers: tuple[tuple[int, int], ...]
    revocations: Revocations | None


def agree(
    handshakes: Sequence[HotKVHandshake], vllm_config: Any, kv_cache_config: Any
) -> Agreement:
    """What these handshakes make. Maps the ranks' fences if stores need words. Raises
    Unsupported."""
    num_ranks = vllm_config.parallel_config.world_size
    space = _key_space(handshakes, num_ranks)
    revocations = None
    # Ranks that have named a fence take no store without a word.
    if checks.writes_before_it_tells(vllm_config, kv_cache_config) or any(
        h.fence is not None for h in handshakes
    ):
        try:
            revocations = _revocations(handshakes, num_ranks)
        except (OSError, ValueError) as error:
            raise Unsupported(
                "model runner V2 writes blocks of this model before it tells connectors' workers "
                f"that they change hands, and the scheduler can't reach the workers' fences "
                f"({error}); set VLLM_USE_V2_MODEL_RUNNER=0"
            ) from None
    kinds = handshakes[0].representations
    if any(h.representations != kinds for h in handshakes):
        logger.warning("hotkv: the ranks do not agree on representations; each rank builds its own")
        kinds = ()
    return Agreement(space, kinds, handshakes[0].sparse_layers, revocations)


def _key_space(handshakes: Sequence[HotKVHandshake], num_ranks: int) -> KeySpace:
    """The one key space of all ranks. Raises Unsupported."""
    spaces = [h.key_space for h in handshakes if h.key_space is not None]
    if len(spaces) < len(handshakes):
        why_off = next(h.why_off for h in handshakes if h.key_space is None)
        raise Unsupported(why_off or "the ranks do not agree on the key space")
    if any(space.fingerprint != spaces[0].fingerprint for space in spaces):
        raise Unsupported("the ranks do not agree on the key space")
    if len(handshakes) < num_ranks:
        # The others have no session, and no store would ever be whole.
        raise Unsupported(f"{len(handshakes)} of {num_ranks} ranks have said what they found")
    if any(h.host not in ("", this_host()) for h in handshakes):
        raise Unsupported(
            "the scheduler and the engine's ranks are on different machines; hotkv keeps KV of "
            "engines that are on one"
        )
    return spaces[0]


def _revocations(handshakes: Sequence[HotKVHandshake], num_ranks: int) -> Revocations:
    """The fences of all ranks. Raises OSError, ValueError."""
    places = [h.fence for h in handshakes if h.fence is not None]
    if len(places) != num_ranks:
        raise ValueError(f"{len(places)} of {num_ranks} ranks have named one")
    return Revocations(places)
