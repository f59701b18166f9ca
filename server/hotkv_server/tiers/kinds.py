"""The kinds of shared tiers (`TIERS`), and the function that finds the shared tiers in a server's
settings (`shared_tiers`).

A server imports the modules of a kind of tier only if the settings name such a tier.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from hotkv_server.dataplane.plan import Region
from hotkv_server.settings import Settings
from hotkv_server.tiers.compression.staged import Staged
from hotkv_server.tiers.drive.flushes import GenerationRelay
from hotkv_server.tiers.protocol import SharedTier

if TYPE_CHECKING:
    from hotkv_server.settings.tiers import MooncakeSettings, S3Settings, ValkeySettings


@dataclass(frozen=True, slots=True)
class TierResources:
    """The resources that a tier gets when it is opened.

    `arena`: host memory with the slots of blocks.
    `fd`: file descriptor of the arena's file, for tiers that map the file in child processes.
    `relay`: function that the tier calls when the store has another generation of a key space than
        the tier expected. (A generation is a number that each flush raises, so another server has
        then flushed the key space.)
    `staged`: staging memory for encoded (compressed) blocks; None if the tier does not compress.
    """

    arena: Region
    fd: int
    relay: GenerationRelay
    staged: Staged | None = None


OpenTier: TypeAlias = Callable[[Any, TierResources], SharedTier]
"""Opens a tier, given its settings and its resources (`TierResources`). Does not wait for the
tier's store."""


TierKind: TypeAlias = Callable[[], OpenTier]
"""Imports the modules of a kind of tier. Returns the function that opens such a tier. Raises
ImportError or MissingError if a library is not installed."""


def _mooncake() -> OpenTier:
    from hotkv_server.tiers.mooncake.tier import mooncake_tier

    def open_tier(settings: "MooncakeSettings", at: TierResources) -> SharedTier:
        return mooncake_tier(at.arena, at.fd, settings, on_generation=at.relay, staged=at.staged)

    return open_tier


def _valkey() -> OpenTier:
    from hotkv_server.tiers.valkey.tier import ValkeyTier

    def open_tier(settings: "ValkeySettings", at: TierResources) -> SharedTier:
        return ValkeyTier(at.arena, settings, on_generation=at.relay, staged=at.staged)

    return open_tier


def _s3() -> OpenTier:
    from hotkv_server.tiers.s3.bucket import check_installed
    from hotkv_server.tiers.s3.tier import S3Tier

    check_installed()

    def open_tier(settings: "S3Settings", at: TierResources) -> SharedTier:
        return S3Tier(at.arena, settings, on_generation=at.relay, staged=at.staged)

    return open_tier


TIERS: dict[str, TierKind] = {
    "mooncake": _mooncake,
    "valkey": _valkey,
    "s3": _s3,
}
"""Maps the name of a tier (its field in `TierSettings`) to the function that imports the tier.
Lookups ask shared tiers in this order."""


def shared_tiers(settings: Settings) -> Iterator[tuple[str, Callable[[TierResources], SharedTier]]]:
    """Yields, for each shared tier in the settings, its name and the function that opens it.

    The function raises ImportError or MissingError if a library of the tier is not installed. If
    the tier compresses, it also allocates the tier's staging memory, and raises OSError if memory
    is short.
    """
    for name, kind in TIERS.items():
        given = getattr(settings.tiers, name)
        if given is not None:
            yield name, _opener(kind, given)


def _opener(kind: TierKind, settings: Any) -> Callable[[TierResources], SharedTier]:
    def open_at(place: TierResources) -> SharedTier:
        open_tier = kind()
        if settings.compress == "off":
            return open_tier(settings, place)
        staged = Staged(place.arena)
        try:
            staged.open()
            return open_tier(settings, TierResources(place.arena, place.fd, place.relay, staged))
        except BaseException:
            staged.close()
            raise

    return open_at
