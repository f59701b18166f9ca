"""What calls of a tier are in a cluster of Valkey or Redis servers, by glide, which knows who has
which key and follows when that changes.

Always true, besides what `Client` says: the epochs are asked for only when all blocks have come,
see `epochs`; no server writes a slot, since glide has memory of its own. Nothing that glide says is
quoted: it may repeat what servers say of AUTH.
"""

import importlib
import re
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hotkv_server.security.path_checks import UnsafeError, check_private_key
from hotkv_server.settings.valkey import ValkeySettings
from hotkv_server.tiers import epoch_numbers
from hotkv_server.tiers.protocol import NO_EPOCH, Codes, Epochs, Read, Seals, Shown, Write
from hotkv_server.tiers.remote.errors import (
    LateError,
    LostError,
    MissingError,
    StoreError,
    UnusableError,
)
from hotkv_server.tiers.valkey import epochs, values
from hotkv_server.tiers.valkey.errors import FULL_CODES, Errors, unusable
from hotkv_server.tiers.valkey.greeting import CHECK_KEY, read_login
from hotkv_server.tiers.valkey.ttl import ttl_ms

if TYPE_CHECKING:
    from glide_sync import ClusterBatch

_CODES = {"PERMISSIONDENIED": "NOPERM", "BUSYLOADINGERROR": "LOADING"}
"""Names of glide for codes of servers."""
_CODE = re.compile(r"(?:^|- )(\w+):")


class ClusterClient:
    """See the module and `Client`. Connects when it is made."""

    def __init__(self, settings: ValkeySettings, until_s: float) -> None:
        self._glide = glide = _library()
        self._ttl_s = settings.ttl_s
        configuration = _configuration(glide, settings, until_s)
        try:
            # Not by `create`, which keeps each client for ever, to connect it after a fork.
            self._client = glide.GlideClusterClient(configuration)
            self._client._create_core_client()
        except glide.GlideError as error:
            raise _connect_error(str(error)) from None
        try:
            batch = self._batch()
            batch.exists([CHECK_KEY])
            _checked(self._ask(batch, until_s))
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return "ClusterClient()"

    def is_fresh(self) -> bool:
        """See `Client`. Connections that have ended are made anew by glide."""
        return True

    def probe(
        self, keys: Sequence[bytes], expected: Epochs, codes: Codes, until_s: float
    ) -> Epochs:
        """See `Client`."""
        batch = self._batch()
        for key in keys:
            batch.exists([key])
        replies = self._ask(batch, until_s)
        _checked(replies)
        changed = self._changed(expected, until_s)
        if not changed:
            codes[:] = [Read.FOUND if reply else Read.ABSENT for reply in replies]
        return changed

    def read(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        expected: Epochs,
        codes: Codes,
        until_s: float,
    ) -> Epochs:
        """See `Client`."""
        batch = self._batch()
        for key in keys:
            batch.get(key)
        errors = Errors(in_cluster=True)
        settled = codes.copy()
        replies = self._ask(batch, until_s)
        for at, (key, slot, reply) in enumerate(zip(keys, slots, replies, strict=True)):
            if isinstance(reply, bytes):
                settled[at] = _placed(key, slot, reply)
            elif reply is None:
                settled[at] = Read.ABSENT
            else:
                code = _code(reply)
                errors.add(code)
                settled[at] = Read.CORRUPT if code == "WRONGTYPE" else Read.FAILED
        errors.check()
        # Not before: see `epochs`.
        changed = self._changed(expected, until_s)
        if changed:
            return changed
        codes[:] = settled
        self.forget([keys[at] for at in (settled == Read.CORRUPT).nonzero()[0].tolist()], until_s)
        return changed

    def write(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        depths: Sequence[int],
        codes: Codes,
        seals: Seals,
        until_s: float,
    ) -> None:
        """See `Client`. Copies each slot once, behind its head."""
        batch, sealed = self._batch(), []
        is_new = self._glide.ConditionalChange.ONLY_IF_DOES_NOT_EXIST
        for key, slot, depth in zip(keys, slots, depths, strict=True):
            head, seal = values.head(key, slot)
            sealed.append(seal)
            ttl = self._glide.ExpirySet(self._glide.ExpiryType.MILLSEC, ttl_ms(self._ttl_s, depth))
            batch.set(key, b"".join((head, slot)), conditional_set=is_new, expiry=ttl)
        errors = Errors(in_cluster=True)
        for at, reply in enumerate(self._ask(batch, until_s)):
            if reply is None:
                codes[at] = Write.PRESENT
            elif reply == "OK":
                codes[at], seals[at] = Write.STORED, sealed[at]
            else:
                code = _code(reply)
                codes[at] = Write.FULL if code in FULL_CODES else Write.FAILED
                errors.add(code)
        errors.check()

    def forget(self, keys: Sequence[bytes], until_s: float) -> None:
        """See `Client`."""
        if keys:
            batch = self._batch()
            for key in keys:
                batch.unlink([key])
            self._ask(batch, until_s)

    def epochs(self, fingerprints: Sequence[str], until_s: float) -> Shown:
        """See `Client`. Nobody says when a server of the cluster has started."""
        found = dict(zip(fingerprints, self._epochs(fingerprints, until_s), strict=True))
        if missing := [name for name, epoch in found.items() if epoch == NO_EPOCH]:
            begun = self._begin_epochs(missing, until_s)
            again = self._epochs(missing, until_s)
            for name, epoch, reply in zip(missing, again, begun, strict=True):
                code, found[name] = _code(reply), epoch
                if epoch == NO_EPOCH and code and code not in FULL_CODES:
                    raise unusable(code, in_cluster=True) or LostError(f"begins no epoch: {code}")
        return Shown(found)

    def raise_epoch(self, fingerprint: str, floor: int, until_s: float) -> int:
        """See `Client`."""
        for _ in range(epochs.RAISE_TRIES):
            self._begin_epochs([fingerprint], until_s)
            (before,) = self._epochs([fingerprint], until_s)
            wanted = epoch_numbers.raised(time.time_ns() // 1000, before, floor)
            batch = self._batch()
            batch.incrby(epochs.epoch_key(fingerprint), wanted - before)
            (reply,) = self._ask(batch, until_s)
            if _code(reply) in FULL_CODES:
                batch = self._batch()
                batch.unlink([epochs.epoch_key(fingerprint)])
                (removed,) = replies = self._ask(batch, until_s)
                _checked(replies)
                if not removed:
                    raise LostError("is full: it has no room for the epoch of a key space")
                return NO_EPOCH
            # Less: it was lost after it was read, and began again at 0.
            if (epoch := _epoch(reply)) >= wanted:
                return epoch
        raise LostError("loses an epoch again and again")

    def close(self) -> None:
        """See `Client`."""
        self._client.close()

    def _batch(self) -> "ClusterBatch":
        batch: ClusterBatch = self._glide.ClusterBatch(is_atomic=False)
        return batch

    def _ask(self, batch: "ClusterBatch", until_s: float) -> list[object]:
        """Sends commands, each to the server that has its key, and returns their replies, of which
        errors are values."""
        left_ms = int((until_s - time.monotonic()) * 1000)
        if left_ms <= 0:
            raise LateError("has not answered in time")
        options = self._glide.ClusterBatchOptions(timeout=left_ms)
        try:
            replies = self._client.exec(batch, raise_on_error=False, options=options)
        except self._glide.TimeoutError:
            raise LateError("has not answered in time") from None
        except self._glide.GlideError as error:
            code = _code(error)
            raise unusable(code, in_cluster=True) or LostError("does not answer") from None
        return list(replies or [])

    def _begin_epochs(self, fingerprints: Sequence[str], until_s: float) -> list[object]:
        batch, begun = self._batch(), epoch_numbers.begun(time.time_ns() // 1000)
        is_new = self._glide.ConditionalChange.ONLY_IF_DOES_NOT_EXIST
        for fingerprint in fingerprints:
            batch.set(epochs.epoch_key(fingerprint), b"%d" % begun, conditional_set=is_new)
        return self._ask(batch, until_s)

    def _epochs(self, fingerprints: Sequence[str], until_s: float) -> list[int]:
        batch = self._batch()
        for fingerprint in fingerprints:
            batch.get(epochs.epoch_key(fingerprint))
        return [_epoch(reply) for reply in self._ask(batch, until_s)]

    def _changed(self, expected: Epochs, until_s: float) -> Epochs:
        if not expected:
            return {}
        now = dict(zip(expected, self._epochs(list(expected), until_s), strict=True))
        # NO_EPOCH is nobody's, also if it was expected.
        return {name: at for name, at in now.items() if at != expected[name] or at == NO_EPOCH}


def check_installed() -> None:
    """Raises MissingError if glide is not installed."""
    _library()


def _library() -> ModuleType:
    try:
        glide = importlib.import_module("glide_sync")
    except ImportError as missing:
        raise MissingError(
            f"a cluster needs the module {missing.name}: pip install 'hotkv[cluster]'"
        ) from missing
    # It writes to the standard error else, and the tier says itself what is wrong.
    glide.Logger.set_logger_config(glide.LogLevel.OFF)
    return glide


def _configuration(glide: ModuleType, settings: ValkeySettings, until_s: float) -> object:
    """How glide connects. Raises UnusableError if files of the settings can't be used."""
    login, credentials, tls = read_login(settings), None, None
    if login is not None:
        try:
            password = login.password.decode()
        except UnicodeDecodeError:
            raise UnusableError(
                "can't be asked, because of password_file: a cluster's password must be UTF-8"
            ) from None
        credentials = glide.ServerCredentials(password, login.user)
    if settings.tls:
        if settings.key_file is not None:
            _check_key(settings.key_file)
        tls = glide.TlsAdvancedConfiguration(
            root_pem_cacerts=_read("ca_file", settings.ca_file),
            client_cert_pem=_read("cert_file", settings.cert_file),
            client_key_pem=_read("key_file", settings.key_file),
        )
    left_ms = max(1, int((until_s - time.monotonic()) * 1000))
    return glide.GlideClusterClientConfiguration(
        [glide.NodeAddress(host, port) for host, port in settings.hosts_and_ports],
        use_tls=settings.tls,
        credentials=credentials,
        request_timeout=int(settings.timeout_s * 1000),
        client_name="hotkv",
        advanced_config=glide.AdvancedGlideClusterClientConfiguration(
            connection_timeout=left_ms, tls_config=tls
        ),
    )


def _check_key(path: Path) -> None:
    try:
        check_private_key(path)
    except (OSError, UnsafeError) as error:
        raise UnusableError(f"can't be asked, because of key_file: {error}") from error


def _read(name: str, path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise UnusableError(f"can't be asked, because of {name}: {error}") from error


def _connect_error(said: str) -> StoreError:
    """The error for what glide says when it can't connect."""
    names = {"WRONGPASS": "WRONGPASS", "NOAUTH": "NOAUTH", "PermissionDenied": "NOPERM"}
    for name, code in names.items():
        if name in said and (error := unusable(code, in_cluster=True)) is not None:
            return error
    return LostError("can't be reached, or is no cluster")


def _code(reply: object) -> str:
    """The code of an error that is a reply; empty for other replies."""
    if not isinstance(reply, Exception):
        return ""
    found = _CODE.findall(str(reply))
    name = found[-1].upper() if found else "ERR"
    return _CODES.get(name, name)


def _checked(replies: Sequence[object]) -> None:
    """Raises StoreError if a reply is an error."""
    for code in filter(None, map(_code, replies)):
        raise unusable(code, in_cluster=True) or LostError(f"refuses: {code}")


def _epoch(reply: object) -> int:
    """As `epochs.parsed`."""
    _checked([reply])
    if reply is None or isinstance(reply, bytes | int):
        return epochs.parsed(reply)
    raise LostError("has an epoch that is no number: remove the keys hotkv/1/*/epoch")


def _placed(key: bytes, slot: memoryview, value: bytes) -> Read:
    """Fills a slot with a value if that is the key's block."""
    whole = memoryview(value)
    head, content = whole[: values.HEAD_BYTES], whole[values.HEAD_BYTES :]
    judged = values.judge_head(head, len(whole), len(slot))
    if judged == Read.FOUND and not values.is_sound(key, head, content):
        return Read.CORRUPT
    if judged == Read.FOUND:
        slot[:] = content
    return judged
