"""Sends requests to a bucket, each with a time limit.

Always true: a request ends by `until_s`. Later data can't reach the caller's memory, because
obstore has its own buffers and returns them only after success. Requests are not retried. All
errors are StoreErrors.
"""

import asyncio
import bisect
import concurrent.futures
import importlib
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from hotkv_proto import extras
from hotkv_server.settings.tiers import S3Settings
from hotkv_server.tiers.remote.client import LateError, MissingError, StoreError, UnusableError
from hotkv_server.tiers.remote.workers import Timeouts

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Credential
import configparser
import re
from dataclasses import dataclass, field
from pathlib import Path

from hotkv_server.security.path_checks import UnsafeError, check_public, check_secret
from hotkv_server.tiers.remote.client import LostError

T = TypeVar("T")
CHECK = "check"
"""Object that each node writes and reads when it connects
(`generation_objects.check_conditions`)."""
REQUESTS_AT_ONCE = 8
"""Most requests in flight of a call of `objects` or `ranges`."""
CLOSE_S = 1.0
"""How long cancelled requests may take when the tier closes."""
GAP_BYTES = 128 << 10
"""Largest gap between two ranges that are read with one request."""


# ----------------------------------------------------------------------------------- The access key

# Always true: errors never quote the file.

MAX_FILE_BYTES = 1 << 16
SECTION = "default"


@dataclass(frozen=True, slots=True)
class AccessKey:
    """Signs requests. `token`: session token; "" for a key that does not expire."""

    id: str
    secret: str = field(repr=False)
    token: str = field(repr=False)


def read_access_key(path: Path) -> AccessKey:
    """Raises UnusableError if the file is open to users outside its group, can't be read, or has
    no key."""
    try:
        check_secret(path)
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES).decode()
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(text)
        section = parser[SECTION]
        key = AccessKey(
            section["aws_access_key_id"],
            section["aws_secret_access_key"],
            section.get("aws_session_token", ""),
        )
    except (OSError, UnsafeError) as error:
        raise UnusableError(f"can't be asked, because of credentials_file: {error}") from error
    except (configparser.Error, KeyError, UnicodeDecodeError):
        # The error's text quotes lines of the file.
        key = AccessKey("", "", "")
    if not key.id or not key.secret:
        raise UnusableError(
            f"can't be asked, because of credentials_file: {path} must have [{SECTION}] with "
            "aws_access_key_id and aws_secret_access_key"
        )
    return key


# ---------------------------------------------------------------------------- Errors of an S3 store

# Messages say how to fix the cause. Always true: they have no secrets, and quote only an
# answer's code, because stores repeat the access key and the signed text in their errors.


class FullError(StoreError):
    """The store has no room."""


class BeyondError(StoreError):
    """A range lies beyond the object's end."""


class DeniedError(UnusableError):
    """The store forbids this object, or all."""


_STATUS = re.compile(r"status code: ([0-9]{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_SYSTEM = re.compile(r"Os\s*\{\s*code: [0-9]+,\s*kind: [A-Za-z]+,\s*message: \"([A-Za-z ]{1,80})\"")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*([A-Za-z]{1,40})")
_KEY = "rejects the access key: check credentials_file"
_ALLOW = (
    "forbids what hotkv needs: allow s3:GetObject, s3:PutObject and s3:DeleteObject on the prefix "
    "and s3:ListBucket on the bucket"
)
_REGION = "says that the bucket is in another region: set region"
_UNUSABLE = {
    "NoSuchBucket": "has no such bucket: create it, or set bucket",
    "InvalidBucketName": "has no such bucket: create it, or set bucket",
    "InvalidAccessKeyId": _KEY,
    "SignatureDoesNotMatch": _KEY,
    "InvalidToken": _KEY,
    "ExpiredToken": "says that the access key has expired: renew credentials_file",
    "RequestTimeTooSkewed": "says that this machine's clock is wrong: set it",
    "AllAccessDisabled": _ALLOW,
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "NotImplemented": "does not know If-None-Match and If-Match, which a flush needs",
}
_FULL = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "EntityTooLarge"})


def is_gone(said: str, is_404: bool) -> bool:
    """An error only means that an object is missing or archived. `said`: obstore's message."""
    code = _CODE.search(said)
    return (is_404 and (code is None or code[1] != "NoSuchBucket")) or (
        code is not None and code[1] == "InvalidObjectState"
    )


def store_error(said: str) -> StoreError:
    """For a message of obstore for which `is_gone` is False."""
    code, status = _CODE.search(said), _STATUS.search(said)
    if code is not None and code[1] in _UNUSABLE:
        return UnusableError(_UNUSABLE[code[1]])
    if (code is not None and code[1] in _FULL) or (status is not None and status[1] == "507"):
        return FullError("has no room")
    if status is not None:
        return _by_status(status[1], code[1] if code is not None else "")
    certificate = _CERTIFICATE.search(said)
    if certificate is not None:
        # An UnusableError, so that the next connect reads `ca_file` again.
        return UnusableError(f"has a certificate that does not pass: {certificate[1]}")
    system = _SYSTEM.search(said)
    if system is not None and "kind: ConnectionRefused" in said:
        return LostError(f"refuses connections: {system[1]}")
    if "dns error" in said:
        return LostError("can't be reached: its host's name is not known")
    if "kind: Timeout" in said or "TimedOut" in said:
        return LateError("has not answered in time")
    if system is not None:
        return LostError(f"can't be reached: {system[1]}")
    return LostError("has broken off its answer")


def _by_status(status: str, code: str) -> StoreError:
    if status in ("401", "403"):
        return DeniedError(_ALLOW)
    if status == "301":
        return UnusableError(_REGION)
    if status == "416":
        return BeyondError("has an object that is shorter than it should be")
    return LostError(f"answers {status} {code}".rstrip())


# --------------------------------------------------------------------------------------- The bucket


class Loop:
    """A thread with an event loop, on which other threads run requests. Thread-safe."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="hotkv-s3-loop", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        return f"Loop({'runs' if self._thread.is_alive() else 'closed'})"

    def run(self, request: Coroutine[object, object, T], until_s: float) -> T:
        """Waits for the request. At `until_s` cancels it and raises LateError."""
        future = asyncio.run_coroutine_threadsafe(request, self._loop)
        try:
            return future.result(max(0.0, until_s - time.monotonic()))
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise LateError("has not answered in time") from None

    def is_alive(self) -> bool:
        """True after `close`."""
        return self._loop.is_closed() or self._thread.is_alive()

    def close(self) -> None:
        """Call it only when no caller waits in `run`. Cancelled requests get up to CLOSE_S."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_end_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Bucket:
    """See the module. Paths are relative to the settings' prefix. Connects at its first request.
    The constructor raises UnusableError for an unusable file of the settings.

    `is_refused`: a request has failed with UnusableError, but not for a single forbidden object.
    """

    def __init__(self, settings: S3Settings, loop: Loop, timeouts: Timeouts) -> None:
        self.is_refused = False
        self._obstore = _library()
        self._loop = loop
        timeout_s = max(timeouts.batch_s, timeouts.connect_s)
        client: ClientConfig = {
            "allow_http": not settings.is_tls,
            "connect_timeout": timedelta(seconds=timeouts.connect_s),
            "timeout": timedelta(seconds=timeout_s),
        }
        if settings.ca_file is not None:
            client["root_certificate"] = _read_authority(settings)
        key = read_access_key(settings.credentials_file) if settings.credentials_file else None

        def credential() -> "S3Credential":
            assert key is not None
            return {
                "access_key_id": key.id,
                "secret_access_key": key.secret,
                "token": key.token or None,
                "expires_at": None,
            }

        self._name = settings.place
        try:
            self._store = self._obstore.store.S3Store(
                settings.bucket,
                prefix=settings.prefix,
                # All options that AWS_* variables would set otherwise, apart from credentials.
                endpoint=settings.url,
                aws_endpoint_url_s3=settings.url,
                region=settings.region,
                virtual_hosted_style_request=False,
                skip_signature=False,
                conditional_put="etag",
                s3_express=False,
                disable_bulk_delete=True,
                # Without TLS the bytes are signed too.
                unsigned_payload=settings.is_tls,
                client_options=client,
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout_s)},
                credential_provider=credential if key is not None else None,
            )
        except (self._obstore.exceptions.BaseError, ValueError):
            # The cause may quote variables of the environment.
            raise UnusableError(
                "can't be asked: check endpoint, ca_file and AWS_* variables"
            ) from None

    def __repr__(self) -> str:
        return f"Bucket({self._name!r})"

    def get(self, path: str, until_s: float) -> tuple[bytes, str] | None:
        """Bytes and version (ETag); None if the object does not exist."""

        async def request() -> tuple[bytes, str]:
            answer = await self._obstore.get_async(self._store, path)
            return bytes(await answer.bytes_async()), answer.meta["e_tag"] or ""

        try:
            return self._ask(request(), until_s)
        except FileNotFoundError:
            return None

    def objects(
        self, paths: Sequence[str], until_s: float
    ) -> list[tuple[bytes, str] | StoreError | None]:
        """For each path the bytes and version, None if it does not exist, or its error. Raises
        LateError, and DeniedError if the store forbids all objects."""
        limit = asyncio.Semaphore(REQUESTS_AT_ONCE)

        async def one(path: str) -> tuple[bytes, str]:
            async with limit:
                answer = await self._obstore.get_async(self._store, path)
                return bytes(await answer.bytes_async()), answer.meta["e_tag"] or ""

        return self._each(map(one, paths), until_s)

    def put(self, path: str, body: "bytes | bytearray", until_s: float, version: str = "") -> bool:
        """Writes an object over one of this version (ETag); for "", only if there is none. False
        if not."""
        exceptions = self._obstore.exceptions

        async def request() -> bool:
            try:
                await self._obstore.put_async(
                    self._store,
                    path,
                    body,
                    mode={"e_tag": version} if version else "create",
                    use_multipart=False,
                )
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                return False
            return True

        try:
            return self._ask(request(), until_s)
        except FileNotFoundError:
            return False

    def delete(self, path: str, until_s: float) -> None:
        async def request() -> None:
            await self._obstore.delete_async(self._store, path)

        try:
            self._ask(request(), until_s)
        except FileNotFoundError:
            return

    def ranges(
        self, wanted: Sequence[tuple[str, list[int], list[int]]], until_s: float
    ) -> "list[list[memoryview] | StoreError | None]":
        """For each object the bytes of its ranges, None if it does not exist, or its error. Raises
        LateError, and DeniedError if the store forbids all objects.

        `wanted`: path, offsets and lengths for each object. Beyond its end, ranges are short or
            empty.
        """
        limit = asyncio.Semaphore(REQUESTS_AT_ONCE)

        async def span(path: str, begin: int, end: int) -> memoryview:
            async with limit:
                # Obstore's get_ranges panics if the object is too short.
                try:
                    got = await self._obstore.get_range_async(
                        self._store, path, start=begin, end=end
                    )
                except self._obstore.exceptions.BaseError as error:
                    if isinstance(store_error(str(error)), BeyondError):
                        return memoryview(b"")
                    raise
                return memoryview(got)

        async def one(path: str, begins: list[int], lengths: list[int]) -> list[memoryview]:
            spans = merged(begins, lengths)
            parts = await asyncio.gather(*(span(path, begin, end) for begin, end in spans))
            return [_piece(spans, parts, *each) for each in zip(begins, lengths, strict=True)]

        return self._each(itertools.starmap(one, wanted), until_s)

    def names(
        self, folder: str, most: int, is_enough: Callable[[str], bool], page_s: float
    ) -> list[str]:
        """Sorted names in a folder, in pages of 1000, until there are `most` or `is_enough` is True
        for a page's last name.

        `page_s`: longest time for a page.
        """
        pages = self._obstore.list(self._store, folder, chunk_size=1000)

        async def page() -> list[str]:
            async for listed in pages:
                return [each["path"].rpartition("/")[2] for each in listed]
            return []

        found: list[str] = []
        while more := self._ask(page(), time.monotonic() + page_s):
            found += more
            if len(found) >= most or is_enough(found[-1]):
                break
        return found[:most]

    def _each(
        self, requests: Iterable[Coroutine[object, object, T]], until_s: float
    ) -> list[T | StoreError | None]:
        """Runs requests for different objects at once: result, None if missing, or error of
        each. If an object is forbidden, reads CHECK, and raises DeniedError if that is forbidden
        too."""

        async def settled(request: Coroutine[object, object, T]) -> T | StoreError | None:
            try:
                return await request
            except (FileNotFoundError, self._obstore.exceptions.BaseError) as error:
                return _judged(error)

        async def all_of_them() -> list[T | StoreError | None]:
            return list(await asyncio.gather(*map(settled, requests)))

        found = self._loop.run(all_of_them(), until_s)
        unusable = [type(one) for one in found if isinstance(one, UnusableError)]
        if DeniedError in unusable:
            self.get(CHECK, until_s)
        self.is_refused = self.is_refused or UnusableError in unusable
        return found

    def _ask(self, request: Coroutine[object, object, T], until_s: float) -> T:
        """Raises FileNotFoundError or StoreError, without the store's text."""
        try:
            return self._loop.run(request, until_s)
        except (FileNotFoundError, self._obstore.exceptions.BaseError) as error:
            judged = _judged(error)
        self.is_refused = self.is_refused or isinstance(judged, UnusableError)
        # Outside of the handler: the store's error would else be the cause, and its text be
        # logged.
        if judged is None:
            raise FileNotFoundError
        raise judged


def _judged(error: Exception) -> StoreError | None:
    """None if only an object is missing."""
    said = str(error)
    return None if is_gone(said, isinstance(error, FileNotFoundError)) else store_error(said)


def merged(begins: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Merges ranges of an object into (begin, end), to save requests: over gaps up to GAP_BYTES,
    but at most half of a merged range is gaps."""
    spans: list[tuple[int, int]] = []
    used_bytes = 0
    for begin, length in sorted(zip(begins, lengths, strict=True)):
        if spans:
            first, end = spans[-1]
            joined = max(end, begin + length)
            used_bytes += length
            if begin <= end + GAP_BYTES and joined - first <= 2 * used_bytes:
                spans[-1] = first, joined
                continue
        spans.append((begin, begin + length))
        used_bytes = length
    return spans


def check_installed() -> None:
    """Raises MissingError without obstore."""
    _library()


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CLOSE_S)


def _piece(
    spans: list[tuple[int, int]], parts: list[memoryview], begin: int, length: int
) -> memoryview:
    at = bisect.bisect_right(spans, begin, key=lambda span: span[0]) - 1
    first = begin - spans[at][0]
    return parts[at][first : first + length]


def _library() -> ModuleType:
    # Loads slowly, and only this tier needs it.
    try:
        return importlib.import_module("obstore")
    except ImportError as missing:
        raise MissingError(
            f"a tier in S3 needs the module {missing.name}: {extras.advice('s3')}, with Python "
            "3.11 or newer"
        ) from missing


def _read_authority(settings: S3Settings) -> bytes:
    assert settings.ca_file is not None
    try:
        check_public(settings.ca_file)
        return settings.ca_file.read_bytes()
    except (OSError, UnsafeError) as error:
        raise UnusableError(f"can't be asked, because of ca_file: {error}") from error
