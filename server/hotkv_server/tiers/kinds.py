"""The kinds of shared tiers, imported only if the settings name them."""

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
    """What a tier gets when it is opened.

    `fd`: of the arena's file, for child processes.
    `relay`: called when the store has an unexpected generation.
    `staged`: None: no compression.
    """

    arena: Region
    fd: int
    relay: GenerationRelay
    staged: Staged | None = None


OpenTier: TypeAlias = Callable[[Any, TierResources], SharedTier]
"""Does not wait for the store."""


TierKind: TypeAlias = Callable[[], OpenTier]
"""Imports a kind. Raises ImportError or MissingError without a library."""


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
"""By field of `TierSettings`; lookups ask in this order."""


def shared_tiers(settings: Settings) -> Iterator[tuple[str, Callable[[TierResources], SharedTier]]]:
    """Name and opener of each shared tier in the settings.

    The opener raises ImportError or MissingError without a library, and OSError if memory is
    short.
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
