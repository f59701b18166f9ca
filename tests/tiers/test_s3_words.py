"""Tests messages about a bucket's problems: they name the setting, and no secret. Also settings
and single requests."""

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

pytest.importorskip("obstore", reason="obstore speaks S3")
import obstore

from hotkv_server.settings.tiers import S3Settings
from hotkv_server.tiers.protocol import Read, Write
from hotkv_server.tiers.remote.client import LateError, LostError, UnusableError
from hotkv_server.tiers.s3 import bucket as bucket_module
from hotkv_server.tiers.s3.bucket import (
    GAP_BYTES,
    AccessKey,
    BeyondError,
    Bucket,
    DeniedError,
    FullError,
    Loop,
    MissingError,
    is_gone,
    merged,
    read_access_key,
    store_error,
)
from tests.contracts.tier_contract import Bench
from tests.doubles.fault_proxy import FaultProxy
from tests.support.waiting import wait_for
from tests.tiers.s3_support import BUCKET, KEYS, QUICK, Server, bench_over, new_prefix, settings_of

SECRET = "s3cr3t-of-hotkv"


def problem_of(bench: Bench) -> str:
    wait_for(bench.tier.problem, "no problem is known")
    assert bench.read([1], [0]).tolist() == [Read.FAILED]
    assert bench.write([1], [0]).tolist() == [Write.FAILED]
    return bench.tier.problem()


def check_works(bench: Bench) -> None:
    bench.fill([1], [0])
    assert bench.write([1], [0]).tolist() == [Write.STORED]
    bench.check_read([1], [4])


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.touch(mode=0o600)
    path.write_text(text)
    path.chmod(mode)
    return path


def written(key: str, secret: str) -> str:
    return f"[default]\naws_access_key_id={key}\naws_secret_access_key={secret}\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bucket": "no-such-bucket"}, "has no such bucket: create it, or set bucket"),
        ({"credentials_file": "reader"}, "forbids what hotkv needs: allow s3:GetObject"),
        ({"credentials_file": "/none"}, "because of credentials_file: [Errno 2]"),
    ],
)
def test_what_is_known_of_a_bucket(
    s3_server: Server, options: dict[str, object], words: str
) -> None:
    options = {name: s3_server.keys.get(str(value), value) for name, value in options.items()}
    with bench_over(s3_server, new_prefix(), **options) as bench:
        assert words in problem_of(bench)


@pytest.mark.parametrize("key", ["nobody", "hotkv"])
def test_an_access_key_that_is_wrong(
    s3_server: Server, tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file = key_file(tmp_path, written(key, SECRET))
    with bench_over(s3_server, new_prefix(), credentials_file=file) as bench:
        assert problem_of(bench).endswith("rejects the access key: check credentials_file")
        said = caplog.text + repr(bench.tier) + repr(bench.tier._shared) + bench.tier.problem()
        assert SECRET not in said
        # Read again at each try to connect.
        file.write_text(written("hotkv", KEYS["hotkv"]))
        wait_for(lambda: not bench.tier.problem(), "the problem stays")
        check_works(bench)
    assert KEYS["hotkv"] not in caplog.text + repr(read_access_key(file))


def test_variables_count_only_without_a_key_file(
    s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
        "AWS_REGION": "elsewhere",
        "AWS_BUCKET": "no-such-bucket",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": SECRET,
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_S3_EXPRESS": "true",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
        "AWS_CONDITIONAL_PUT": "disabled",
    }.items():
        monkeypatch.setenv(name, value)
    with bench_over(s3_server, new_prefix()) as bench:
        check_works(bench)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hotkv")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["hotkv"])
    for name in ("AWS_SESSION_TOKEN", "AWS_SKIP_SIGNATURE"):
        monkeypatch.delenv(name)
    with bench_over(s3_server, new_prefix(), credentials_file=None) as bench:
        check_works(bench)
        assert KEYS["hotkv"] not in repr(bench.tier) + repr(bench.tier._shared.bucket()._store)


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (written("hotkv", SECRET), 0o604, "can be read by every user"),
        ("", 0o600, r"must have \[default\] with aws_access_key_id and aws_secret_access_key"),
        (f"[default]\n{SECRET}\n", 0o600, r"must have \[default\] with"),
        (f"aws_secret_access_key={SECRET}", 0o600, r"must have \[default\] with"),
        (written("", SECRET), 0o600, r"must have \[default\] with"),
        (written("hotkv", SECRET) + "%(x)s", 0o600, r"must have \[default\] with"),
    ],
)
def test_a_key_file_that_is_wrong(tmp_path: Path, text: str, mode: int, words: str) -> None:
    with pytest.raises(UnusableError, match=words) as error:
        read_access_key(key_file(tmp_path, text, mode))
    assert "credentials_file" in str(error.value) and SECRET not in str(error.value)
    assert SECRET not in repr(error.value.__cause__)


def test_a_key_with_a_token(s3_server: Server, s3_proxy: FaultProxy, tmp_path: Path) -> None:
    def record(piece: bytes) -> Iterator[bytes]:
        sent.append(piece)
        yield piece

    text = written("a", "100%") + "aws_session_token = b%c==\n[other]\naws_access_key_id = x\n"
    file, sent = key_file(tmp_path, text), list[bytes]()
    assert read_access_key(file) == AccessKey("a", "100%", "b%c==")
    s3_proxy.on_command = record
    options = {"endpoint": f"http://127.0.0.1:{s3_proxy.port}", "credentials_file": file}
    with bench_over(s3_server, new_prefix(), **options):
        wait_for(lambda: any(b"x-amz-security-token: b%c==\r\n" in piece for piece in sent))


def test_a_folder_is_listed_page_by_page(
    s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_pages(store: object, folder: str, chunk_size: int) -> object:
        return listed(store, folder, chunk_size=2)

    def is_enough(last: str) -> bool:
        lasts.append(last)
        return last == "5"

    # Each page takes 590 of 600 s: the limit is per page.
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 590 * len(lasts))
    prefix, lasts, listed = new_prefix(), list[str](), obstore.list
    for number in range(9):
        s3_server.store.put(f"{prefix}/folder/{number}", b"x")
    monkeypatch.setattr(obstore, "list", in_pages)
    loop = Loop()
    bucket = Bucket(settings_of(s3_server, prefix), loop, QUICK.timeouts)
    monkeypatch.setattr(bucket_module, "time", clock)
    assert bucket.names("folder", 9, is_enough, 600.0) == [*"012345"] and lasts == [*"135"]
    assert bucket.names("folder", 4, is_enough, 600.0) == [*"0123"] and lasts == [*"1351"]
    assert bucket.names("folder", 3, is_enough, 600.0) == [*"012"]
    assert bucket.names("none", 3, is_enough, 600.0) == []
    until_s = clock.monotonic() + 60
    assert bucket.put("a", b"12345", until_s) and bucket.get("none", until_s) is None
    assert not bucket.put("none", b"1", until_s, '"x"')
    bucket.delete("none", until_s)
    wanted = [("a", [0, 3, 9], [2, 9, 4]), ("none", [0], [1])]
    assert bucket.ranges(wanted, until_s) == [[b"12", b"45", b""], None]
    loop.close()


def test_a_certificate_file_that_is_wrong(s3_server: Server, tmp_path: Path) -> None:
    options = {"endpoint": "https://127.0.0.1:1", "ca_file": tmp_path / "none"}
    with bench_over(s3_server, new_prefix(), **options) as bench:
        assert "because of ca_file: [Errno 2]" in problem_of(bench)
        (tmp_path / "none").write_text("no certificate")
        wait_for(lambda: "check endpoint, ca_file" in bench.tier.problem(), "another problem")


def test_without_its_library_the_tier_says_so(
    s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(bucket_module.importlib, "import_module", missing)
    with (
        pytest.raises(MissingError, match="module obstore: pip install 'obstore"),
        bench_over(s3_server, new_prefix()),
    ):
        pass


def test_library_loads_with_the_first_tier() -> None:
    code = "import sys, hotkv_server.tiers.s3.tier; sys.exit('obstore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def answered(status: int, code: str = "") -> str:
    body = f"<Error><Code>{code}</Code><AWSAccessKeyId>{SECRET}</AWSAccessKeyId></Error>"
    return f"Server returned non-2xx status code: {status} Words: {body if code else ''}"


UNREACHABLE = 'Os {\n  code: 113,\n  kind: HostUnreachable,\n  message: "No route to host",\n}'


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (answered(404, "NoSuchBucket"), UnusableError, "has no such bucket"),
        (answered(403, "AccessDenied"), DeniedError, "allow s3:GetObject"),
        (answered(403, "SignatureDoesNotMatch"), UnusableError, "rejects the access key"),
        (answered(400, "ExpiredToken"), UnusableError, "has expired"),
        (answered(403, "RequestTimeTooSkewed"), UnusableError, "clock is wrong"),
        (answered(400, "AuthorizationHeaderMalformed"), UnusableError, "set region"),
        (answered(301), UnusableError, "set region"),
        (answered(403), DeniedError, "allow s3:GetObject"),
        (answered(401), DeniedError, "allow s3:GetObject"),
        (answered(501, "NotImplemented"), UnusableError, "If-None-Match"),
        (answered(507), FullError, "no room"),
        (answered(403, "QuotaExceeded"), FullError, "no room"),
        (answered(416, "InvalidRange"), BeyondError, "shorter"),
        (answered(503, "SlowDown"), LostError, "answers 503 SlowDown"),
        (answered(500), LostError, "answers 500"),
        (f"InvalidCertificate(\n  Expired {SECRET}", UnusableError, "does not pass: Expired"),
        (f"dns error {SECRET}", LostError, "host's name is not known"),
        (f"kind: Timeout {SECRET}", LateError, "has not answered in time"),
        (f"source: TimedOut {SECRET}", LateError, "has not answered in time"),
        (UNREACHABLE, LostError, "can't be reached: No route to host"),
        (UNREACHABLE.replace("Host", "ConnectionRefused"), LostError, "refuses connections: No"),
        (SECRET, LostError, "has broken off its answer"),
    ],
)
def test_what_a_store_says_is_said_in_words(said: str, kind: type, words: str) -> None:
    error = store_error(said)
    assert type(error) is kind and words in str(error) and SECRET not in str(error)


def test_missing_object_says_nothing_of_the_store() -> None:
    assert is_gone(answered(404, "NoSuchKey"), True) and is_gone(answered(404), True)
    assert not is_gone(answered(404, "NoSuchBucket"), True)
    assert is_gone(answered(403, "InvalidObjectState"), False)
    assert not is_gone(answered(403, "AccessDenied"), False)


def test_ranges_are_merged_over_small_gaps() -> None:
    gap, much = GAP_BYTES, 1 << 20
    assert merged([], []) == []
    assert merged([10, 0], [5, 10]) == [(0, 15)]
    assert merged([0, much + gap], [much, 1]) == [(0, much + gap + 1)]
    assert merged([0, much + gap + 1], [much, 1]) == [(0, much), (much + gap + 1, much + gap + 2)]
    # At most half of the merged bytes may be gaps.
    assert merged([much, much + 20, much + 60], [10, 10, 20]) == [(much, much + 80)]
    assert merged([0, 20, 61], [10, 10, 20]) == [(0, 30), (61, 81)]
    assert merged([0, 2, 12], [10, 3, 1]) == [(0, 13)]


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ({}, "bucket", "Field required"),
        ({"bucket": "A"}, "bucket", "3 to 63 of a-z"),
        ({"bucket": "a/b"}, "bucket", "3 to 63 of a-z"),
        ({"prefix": ""}, "prefix", "must be a folder"),
        ({"prefix": "/a"}, "prefix", "must be a folder"),
        ({"prefix": "a//b"}, "prefix", "must be a folder"),
        ({"prefix": "a/../b"}, "prefix", "must be a folder"),
        ({"endpoint": "s3.example"}, "endpoint", "must be https://host"),
        ({"endpoint": "ftp://s3.example"}, "endpoint", "must be https://host"),
        ({"endpoint": f"https://a:{SECRET}@s3.example"}, "endpoint", "must have no user"),
        ({"endpoint": "https://s3.example/bucket"}, "endpoint", "must have no user, path"),
        ({"endpoint": "https://s3.example:99999"}, "endpoint", "the port must be"),
        ({"region": "a b"}, "region", "must be a region"),
        ({"endpoint": "http://s3.example", "ca_file": "/x"}, "", "ca_file needs an https://"),
        ({"connections": 0}, "connections", "greater than or equal to 1"),
        ({"node": "a/b"}, "node", "should match"),
        ({"secret": SECRET}, "secret", "Extra inputs"),
    ],
)
def test_settings_say_what_is_wrong(options: dict[str, object], name: str, words: str) -> None:
    with pytest.raises(ValidationError) as error:
        S3Settings(**({"bucket": BUCKET} | options if options else {}))
    (only,) = error.value.errors()
    assert ".".join(map(str, only["loc"])) == name and words in only["msg"]
    assert SECRET not in str(error.value)


def test_settings_say_where_the_bucket_is() -> None:
    settings = S3Settings(bucket=BUCKET, region="eu-central-1")
    assert settings.place == f"https://s3.eu-central-1.amazonaws.com/{BUCKET}/hotkv"
    assert settings.is_tls
    plain = S3Settings(bucket=BUCKET, endpoint="http://[::1]:8333/")
    assert plain.url == "http://[::1]:8333" and not plain.is_tls
