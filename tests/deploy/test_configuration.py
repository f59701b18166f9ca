"""Tests that deploy/hotkv.toml lists exactly the server's settings, with meaning, unit and
default."""

import re
from pathlib import Path

import pytest
from pydantic import ByteSize

from hotkv_server.settings import Settings, load_settings, tomllib
from hotkv_server.settings.security import TenantSettings
from hotkv_server.settings.sources import leaves

CONFIG = Path(__file__).parents[2] / "deploy" / "hotkv.toml"
EXAMPLES = {"arena.bytes"}
"""Shown with another value than the default, which their comment has."""
ALL = dict(leaves(Settings))


def with_tables() -> str:
    """Tables uncommented; a table ends at the first line that is no comment."""

    def table(match: re.Match[str]) -> str:
        return "\n".join(line.removeprefix("# ") for line in match[0].splitlines())

    return re.sub(r"^# \[[^]]+\]\n(?:#.*\n)*", table, CONFIG.read_text(), flags=re.MULTILINE)


def uncommented() -> str:
    text = re.sub(r"^# (\w+ = )", r"\1", with_tables(), flags=re.MULTILINE)
    without_list = text.replace("tenants = []\n", "")
    lines = [re.sub(r"^#   ", "", line) for line in without_list.splitlines()]
    # TOML: a table follows the plain settings of the table above.
    example = [
        line for line, old in zip(lines, without_list.splitlines(), strict=True) if line != old
    ]
    return "\n".join([line for line in lines if line not in example] + example) + "\n"


def shown() -> dict[str, tuple[str, str]]:
    """Dotted name to (value, comment), also of commented-out settings."""
    found: dict[str, tuple[str, str]] = {}
    section, comment = "", list[str]()
    for line in with_tables().splitlines():
        if match := re.fullmatch(r"\[([\w.]+)\]", line):
            section, comment = f"{match[1]}.", []
        elif match := re.fullmatch(r"(?:# )?(\w+) = (.*)", line):
            found[section + match[1]] = match[2], " ".join(comment)
            comment = []
        elif line.startswith("#"):
            comment.append(line.strip("# "))
        else:
            comment = []
    return found


def test_every_setting_is_there_and_no_other() -> None:
    assert set(shown()) == set(ALL)


def test_what_is_set_is_the_default() -> None:
    loaded, defaults = load_settings(CONFIG, [], "test"), Settings()

    def value(settings: Settings, name: str) -> object:
        found: object = settings
        for part in name.split("."):
            if found is None:
                return None
            found = getattr(found, {"copy": "copy_"}.get(part, part))
        return found

    assert {name for name in ALL if value(loaded, name) != value(defaults, name)} == EXAMPLES
    for name in EXAMPLES:
        assert "Default: " in shown()[name][1]


def test_each_has_a_comment_with_its_unit() -> None:
    for name, (value, comment) in shown().items():
        assert ALL[name].description and comment, name
        assert not name.endswith("_s") or "second" in comment, name
        if ALL[name].annotation is ByteSize:
            assert re.search(r"[KMG]iB", value + comment) or "byte" in comment, name


def test_all_settings_in_comments_can_be_set(tmp_path: Path) -> None:
    text = uncommented()
    (tenant,) = tomllib.loads(text)["security"]["tenants"]
    assert set(tenant) == set(TenantSettings.model_fields)
    config = tmp_path / "hotkv.toml"
    config.write_text(text)
    assert load_settings(config, [], "test").security.tenants[0].name == tenant["name"]


def test_files_environment_and_flags_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "hotkv.toml"
    config.write_text(
        '[arena]\npin = "off"\nbytes = "32MiB"\n[copy]\nthreads = 2\ncuda = "off"\n'
        "[residency]\ngrace_s = 9\n"
    )
    monkeypatch.setenv("HOTKV_COPY__THREADS", "3")
    monkeypatch.setenv("HOTKV_COPY__CUDA", "on")
    monkeypatch.setenv("HOTKV_ARENA__BYTES", "48MiB")
    found = load_settings(config, ["--copy.cuda", "auto"], "test")
    assert (found.residency.grace_s, found.copy_.threads, found.copy_.cuda) == (9, 3, "auto")
    assert (found.arena.pin, found.arena.bytes) == ("off", 48 << 20)
