"""Tests that the server believes no path that another user could have changed."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from demo.processes import runtime_folder
from hotkv_server.security.path_checks import PathKind
from hotkv_server.settings import Settings, load_settings
from hotkv_server.settings.sources import leaves
from hotkv_server.startup.places import OF_TIERS, TRUSTED_PATHS, value_of
from hotkv_server.startup.preflight import check_and_clean
from hotkv_server.tiers.remote.client import UnusableError
from hotkv_server.tiers.s3 import bucket
from hotkv_server.tiers.valkey import connection, stream

OTHER_UID = 4242
DIRS = (PathKind.SHARED_DIR, PathKind.OWN_DIR, PathKind.PRIVATE_DIR)
NEEDED = {
    "tls": ("--security.tls.certificate", "certificate", "--security.tls.key", "key"),
    "valkey": ("--tiers.valkey.address", "localhost:1", "--tiers.valkey.tls", "true"),
    "s3": ("--tiers.s3.bucket", "bucket", "--tiers.s3.endpoint", "https://localhost:1"),
}
READERS: dict[str, Any] = {
    "tiers.valkey.password_file": lambda tiers: connection.read_login(tiers.valkey),
    "tiers.valkey.ca_file": lambda tiers: stream._tls_context(tiers.valkey),
    "tiers.valkey.cert_file": lambda tiers: stream._tls_context(tiers.valkey),
    "tiers.valkey.key_file": lambda tiers: stream._tls_context(tiers.valkey),
    "tiers.s3.credentials_file": lambda tiers: bucket.read_access_key(tiers.s3.credentials_file),
    "tiers.s3.ca_file": lambda tiers: bucket._read_authority(tiers.s3),
}
"""Files of stores are checked whenever they are read."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with runtime_folder(64 << 20) as made:
        yield made


def test_every_path_of_the_settings_has_a_check() -> None:
    paths = {
        name
        for name, info in leaves(Settings)
        if Path in (info.annotation, *get_args(info.annotation))
    }
    assert paths == set(TRUSTED_PATHS)
    stores = {name for name in paths if name.startswith(OF_TIERS)} - {"tiers.disk.path"}
    assert stores == set(READERS)


def settings_with(folder: Path, name: str, path: Path) -> Settings:
    """All paths lie in `folder`; the setting `name` is `path`."""
    flags = {
        "runtime_dir": folder / "run",
        "arena.dir": folder / "arena",
        "arena.bytes": "16MiB",
        "http.port": "-1",
        name: path,
    }
    part = name.split(".")[1] if "." in name else ""
    values = NEEDED.get(part, ())
    for flag, value in zip(values[::2], values[1::2], strict=True):
        is_file = flag.startswith("--security.tls")
        flags.setdefault(flag[2:], folder / value if is_file else value)
    if name in ("tiers.valkey.cert_file", "tiers.valkey.key_file"):
        for other in ("cert_file", "key_file"):
            flags.setdefault(f"tiers.valkey.{other}", folder / other)
    listed = [
        text
        for flag, value in flags.items()
        for text in (f"--{flag.replace('_', '-')}", str(value))
    ]
    return load_settings(None, listed, "hotkv-server")


def refusal(settings: Settings, name: str) -> str:
    """Why the setting's path is not believed."""
    assert isinstance(value_of(settings, name), Path)
    if name in READERS:
        with pytest.raises(UnusableError) as caught:
            READERS[name](settings.tiers)
        return str(caught.value)
    problems, notes = check_and_clean(settings)
    assert not any("in use" in note for note in notes)
    said = [one for one in problems if one.startswith((f"{name}: ", "runtime_dir: "))]
    assert said, problems
    return said[0]


def prepared(folder: Path, name: str) -> Path:
    """Makes what the setting names, as it should be."""
    for other in ("certificate", "key", "cert_file", "key_file"):
        (folder / other).touch(mode=0o600)
    path = folder / "path"
    if TRUSTED_PATHS[name] in DIRS:
        path.mkdir(mode=0o700)
    elif TRUSTED_PATHS[name] is not PathKind.SOCKET:
        path.write_text("text\n")
        path.chmod(0o600)
    return path


CHECKED = [name for name, kind in TRUSTED_PATHS.items() if kind is not None]
FILES = [name for name in CHECKED if TRUSTED_PATHS[name] in (PathKind.SECRET, PathKind.PUBLIC)]


@pytest.mark.parametrize(
    "name", [name for name in CHECKED if name not in ("security.admin_socket",)]
)
def test_what_every_user_can_write_is_refused(folder: Path, name: str) -> None:
    path = prepared(folder, name)
    path.chmod(0o777 if path.is_dir() else 0o602)
    said = refusal(settings_with(folder, name, path), name)
    assert str(path) in said and f"{stat.S_IMODE(path.stat().st_mode):04o}" in said
    assert "chmod " in said


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("name", CHECKED)
def test_what_another_user_owns_is_refused(folder: Path, name: str) -> None:
    path = prepared(folder, name)
    if TRUSTED_PATHS[name] is PathKind.SOCKET:
        path.touch()
    os.chown(path, OTHER_UID, OTHER_UID)
    said = refusal(settings_with(folder, name, path), name)
    assert f"{path} " in said and str(OTHER_UID) in said
    assert any(word in said for word in ("chown", "rm "))


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give links away")
@pytest.mark.parametrize("name", CHECKED)
def test_a_link_of_another_user_is_refused(folder: Path, name: str) -> None:
    path, link = prepared(folder, name), folder / "link"
    link.symlink_to(path)
    os.chown(link, OTHER_UID, OTHER_UID, follow_symlinks=False)
    said = refusal(settings_with(folder, name, link), name)
    assert f"{link} is a symbolic link of user id {OTHER_UID}" in said or (
        f"{link} is a symbolic link" in said
    )


@pytest.mark.parametrize("name", FILES)
def test_file_others_can_replace_is_refused(folder: Path, name: str) -> None:
    own = folder / "own"
    own.mkdir()
    path = prepared(folder, name).rename(own / "path")
    own.chmod(0o777)
    said = refusal(settings_with(folder, name, path), name)
    assert f"chmod o-w {own}" in said
    own.chmod(0o1777)
    if name not in READERS:
        problems, _ = check_and_clean(settings_with(folder, name, path))
        assert not [one for one in problems if str(own) in one and "chmod" in one]


@pytest.mark.parametrize("name", ["arena.dir", "tiers.disk.path"])
@pytest.mark.parametrize(
    "file",
    ["state.json", "table", "records", "generations.json", "ledger", "calibration-x", "slabs"],
)
def test_each_file_among_blocks_is_checked(folder: Path, name: str, file: str) -> None:
    path = prepared(folder, name)
    (path / file).touch(mode=0o600)
    (path / file).chmod(0o666)
    said = refusal(settings_with(folder, name, path), name)
    assert f"{path / file} can be written by others (mode 0666)" in said
    (path / file).unlink()
    (path / file).symlink_to(folder / "elsewhere")
    assert f"{path / file} is a symbolic link" in refusal(settings_with(folder, name, path), name)


def test_group_may_read_tenantless_disk_folder(folder: Path) -> None:
    path = prepared(folder, "tiers.disk.path")
    settings = settings_with(folder, "tiers.disk.path", path)
    for mode, is_open in ((0o750, False), (0o770, True), (0o755, True), (0o701, True)):
        path.chmod(mode)
        problems, _ = check_and_clean(settings)
        assert any(one.startswith("tiers.disk.path: ") for one in problems) == is_open, problems


def test_a_check_leaves_no_folder_behind(folder: Path) -> None:
    settings = settings_with(folder, "tiers.disk.path", folder / "disk" / "below")
    check_and_clean(settings)
    assert not (folder / "disk").exists() and not (folder / "arena").exists()


def test_settings_that_every_user_can_write_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "hotkv.toml"
    config.write_text('log_level = "debug"\n')
    assert load_settings(config, [], "hotkv-server").log_level == "debug"
    config.chmod(0o666)
    with pytest.raises(ValueError, match=f"--config: {config} can be written.*chmod o-w {config}"):
        load_settings(config, [], "hotkv-server")
