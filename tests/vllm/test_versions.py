"""An untested vLLM: on if all that hotkv uses is unchanged, else off, naming what is not.

For each listed use the list asks for something else than vLLM has. Releases come from `make check`.
"""

import abc
import functools
import inspect
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hotkv_vllm import versions
from hotkv_vllm.compat import uses
from hotkv_vllm.compat.uses import DOORS, OWN, answer, cannot_take, changed_uses

LIST = uses.read_list()
SPECS = "vllm.v1.kv_cache_interface"


def compared(module: str, name: str, *entries: Any) -> list[str]:
    return list(changed_uses({module: {name: entries}}))


# ----------------------------------------------------------------------------------- what is listed


@pytest.mark.parametrize("door", DOORS)
def test_untouched_unknown_version_checks_out_quickly(door: str) -> None:
    every = [answer(door, "0.99.0") for _ in range(3)]
    assert all(found.is_on and found.num_uses > 50 for found in every), every
    # The first imports what this process lacks.
    assert min(found.took_s for found in every) < 0.1


def others(name: str, entry: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What vLLM does not have: name and form."""
    yield f"{name}_x", entry
    kind = entry["kind"]
    yield name, {**entry, "kind": "module" if kind == "value" else "value"}
    if entry.get("calls"):
        last = [call for call in entry["calls"] if "..." not in call][-1:]
        yield name, {**entry, "calls": [f"{call}, newly=".strip(", ") for call in last]}
    if signature := entry.get("signature"):
        yield name, {**entry, "signature": signature.replace(")", ", newly)")}
    if entry.get("callers"):
        yield name, {**entry, "callers": entry["callers"][1:]}
    if entry.get("abstract"):
        yield name, {**entry, "abstract": [*entry["abstract"][1:], "newly"]}


@pytest.mark.parametrize("door", DOORS)
def test_each_use_that_differs_is_named(door: str) -> None:
    wrong, num_changed = [], 0
    for module, names in LIST["doors"][door].items():
        for name, forms in names.items():
            fitting = [form for form in forms if form and not compared(module, name, form)]
            if not fitting:
                # Only a later version has it.
                assert not compared(module, name, None) and None in forms
                continue
            entry = fitting[-1]
            assert compared(module, name, None) == [f"{name} is there"]
            for other, form in others(name, entry):
                found = compared(module, other, form)
                num_changed += 1
                if not any(other.rpartition(".")[2] in line for line in found):
                    wrong.append((module, other, form, found))
    assert not wrong, wrong[:5]
    assert num_changed > 500


# ------------------------------------------------------------------------------- what vLLM may have


class Base(abc.ABC):
    noted: list[Path]

    @abc.abstractmethod
    def store(self, block: int, *, last: bool = False) -> None: ...

    @abc.abstractmethod
    def count(self) -> int: ...


class Later(Base):
    size: int = 3
    nothing: str | None = None

    def __init__(self, request: Path | None, *rest: int, name: str = "", **more: Any) -> None:
        self.request = request
        self.told = more

    @property
    def length(self) -> Path:
        raise NotImplementedError

    @functools.cached_property
    def slow(self) -> int:
        return 1

    @classmethod
    def made(cls, of: Any) -> "Later":
        return cls(of)

    def pause(self) -> list[int]:
        return [self.resume(one) for one in range(3)]

    def resume(self, step: int) -> int:
        return step


METHOD, VALUE = {"kind": "method"}, {"kind": "value"}
FORMS = [
    ("Later.size", VALUE, ""),
    ("Later.nothing", VALUE, ""),
    ("Later.told", VALUE, ""),
    ("Later.slow", VALUE, ""),
    ("Later.other", VALUE, "Later has no attribute other"),
    ("Newer", {"kind": "class"}, "later_vllm.Newer is not there"),
    ("Newer.size", VALUE, "later_vllm.Newer is not there"),
    ("Later.length", METHOD, "Later.length is a value, and was a method"),
    ("Later.pause", VALUE, "Later.pause is a method, and was a value"),
    ("Later.request", VALUE | {"gives": "Path"}, ""),
    ("Later.noted", VALUE | {"gives": "[Path]"}, ""),
    ("Later.length", VALUE | {"gives": "Block"}, "Later.length gives Path, and gave Block"),
    ("Later.resume", METHOD | {"gives": "Block"}, "Later.resume gives int, and gave Block"),
    ("Later.resume", METHOD | {"signature": "method(self, step)"}, ""),
    (
        "Later.store",
        METHOD | {"signature": "method(self, block)"},
        "Later.store is now method(self, block, *, last=), and was method(self, block)",
    ),
    ("Later.made", {"kind": "classmethod", "signature": "classmethod(cls, of)"}, ""),
    ("Later.length", VALUE | {"signature": "property(self)"}, ""),
    ("Later.made", {"kind": "classmethod", "calls": ["of"]}, ""),
    (
        "Later",
        {"kind": "class", "calls": ["request, *, ...", "request=, other="]},
        "",
    ),
    ("Later", {"kind": "class", "calls": [""]}, "Later needs request"),
    ("Later.resume", METHOD | {"callers": ["pause"]}, ""),
    ("Later.pause", METHOD | {"callers": ["run"]}, "Later.pause is called by nobody"),
    ("Base", {"kind": "class", "abstract": ["store"]}, "Base asks for count"),
]


@pytest.mark.parametrize("name, form, said", FORMS)
def test_differences_are_told_of_a_living_module(
    name: str, form: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("later_vllm")
    vars(module).update(Later=Later, Base=Base)
    monkeypatch.setitem(sys.modules, "later_vllm", module)
    assert compared("later_vllm", name, form) == ([said] if said else [])
    # One of the forms must fit.
    assert (
        not compared("later_vllm", name, form, None)
        or "is there" in compared("later_vllm", name, form, None)[0]
    )


def taker(first: int, /, second: int, third: int = 3, *, fourth: int, fifth: int = 5) -> None: ...


@pytest.mark.parametrize(
    "call, why",
    [
        ("first, second, fourth=", ""),
        ("first, fifth=, fourth=, second=", ""),
        ("first, ...", ""),
        ("first, fourth=", "needs second"),
        ("first, third, fourth=", "takes second in the place of third"),
        ("first, second, third, ?, fourth=", "takes 3 arguments, and gets 4"),
        ("first, second, fourth=, sixth=", "has no parameter sixth"),
    ],
)
def test_what_a_call_is_refused_for(call: str, why: str) -> None:
    assert cannot_take(call, list(inspect.signature(taker).parameters.values())) == why


def test_unlisted_specs_and_backends_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1 import kv_cache_interface

    paged = type("PagedSpec", (kv_cache_interface.FullAttentionSpec,), {"__module__": SPECS})
    monkeypatch.setattr(kv_cache_interface, "PagedSpec", paged, raising=False)
    backends = {name: set(members) - {"CPU_ATTN"} for name, members in LIST["backends"].items()}
    assert list(uses.unknown_kinds(LIST["specs"], backends)) == [
        "PagedSpec is a KV cache spec that nobody has looked at",
        "CPU_ATTN is an attention backend that nobody has looked at",
    ]


def test_modules_that_lack_a_library_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "for_a_gpu.py").write_text("import hotkv_has_no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not compared("for_a_gpu", "Backend", {"kind": "class"})
    assert compared("vllm.nowhere.at_all", "Some", {"kind": "class"}) == [
        "vllm.nowhere.at_all.Some is not there"
    ]


def test_without_the_list_hotkv_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (None, "{"):
        if text is not None:
            (tmp_path / "uses.json").write_text(text)
        monkeypatch.setattr(uses, "LIST", tmp_path / "uses.json")
        found = answer(OWN, "0.99.0")
        assert not found.is_on and "the list of what is used of it can't be read" in str(found)


# --------------------------------------------------------------------------------------- the engine


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    versions._answer.cache_clear()
    yield
    versions._answer.cache_clear()


def lines(caplog: Any) -> list[str]:
    """Lines of other threads are left out."""
    return [one.getMessage() for one in caplog.records if one.name == versions.logger.name]


def test_tested_version_is_not_compared(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(uses, "read_list", lambda: 1 // 0)
    for version in ("0.32.0", "0.33.1rc2", "0.32.1+cu130"):
        monkeypatch.setattr(versions, "VERSION", version)
        assert versions.why_off(OWN, False) == "" and not lines(caplog)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.32.0", "dev", "0.33.1rc1.dev268+ge2b"])
def test_unknown_version_is_logged_or_names_gaps(
    monkeypatch: pytest.MonkeyPatch, version: str, caplog: Any
) -> None:
    monkeypatch.setattr(versions, "VERSION", version)
    with caplog.at_level(logging.INFO):
        assert versions.why_off(OWN, False) == ""
    said = lines(caplog)[0]
    assert said.startswith(f"hotkv is on: vLLM {version} is not tested, but all ")
    versions._answer.cache_clear()
    monkeypatch.setattr("vllm.v1.request.Request", type("Request", (), {}))
    why = versions.why_off(OWN, False)
    assert re.fullmatch(
        rf"it is tested with vLLM 0\.32 to 0\.33, and this is {re.escape(version)}: "
        r"(Request has no attribute \w+; ){3}"
        r"and \d+ more; set hotkv.allow_untested_vllm to use it nevertheless",
        why,
    ), why
    assert versions.why_off(OWN, True) == ""
