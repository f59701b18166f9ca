"""The image that stands for vLLM's gets vLLM's packages: all that are required, and no others."""

from pathlib import Path

import pytest

from tests.deploy.vllm_base import closure, files


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four made-up packages: the first wants the second with an extra."""
    requires = {
        "made-up-first": ["made-up-second[fast]", "made-up-missing"],
        "made-up-second": ['made-up-third; extra == "fast"', 'made-up-fourth; extra == "slow"'],
        "made-up-third": ["made-up-first"],
        "made-up-fourth": [],
    }
    for name, wanted in requires.items():
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        lines = [f"Requires-Dist: {one}" for one in wanted]
        (folder / "METADATA").write_text("\n".join(["Name: " + name, "Version: 1.0", *lines]))
        own = f"{name.replace('-', '_')}.py"
        (tmp_path / own).touch()
        (tmp_path / "shared.py").touch()
        (folder / "RECORD").write_text(f"{own},,\nshared.py,,\n../../bin/{name},,\ngone.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_package_brings_what_it_requires(site: Path) -> None:
    found = closure("Made_Up.First")
    assert set(found) == {"made-up-first", "made-up-second", "made-up-third"}


def test_a_package_that_is_not_there_is_named() -> None:
    with pytest.raises(SystemExit, match="made-up-missing is not installed"):
        closure("made-up-missing")


def test_each_file_of_the_packages_is_packed_once(site: Path) -> None:
    packed = list(files(closure("made-up-first")))
    assert sorted(path for _, path in packed) == [
        *("made_up_first.py", "made_up_second.py", "made_up_third.py", "shared.py"),
    ]
    assert all(here == site / path for here, path in packed)
