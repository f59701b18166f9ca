"""An untested vLLM: on if all that hotkv uses is unchanged, else off, naming what is not.

One listed use at a time is broken in vLLM's text. Releases come from `make check`.
"""

import ast
import copy
import functools
import gc
import logging
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotkv_vllm import versions
from hotkv_vllm.compat import definitions, uses
from hotkv_vllm.compat.definitions import Definition, FunctionDef, Readable, Sources, kind_of
from hotkv_vllm.compat.uses import OWN, ApiUses, Form, answer
from tests.vllm.changed_sources import Changed, Once, Replaced
from tools.check_vllm_api import CACHE
from tools.vllm_sources import exact, installed

LIST = ApiUses.read(uses.LIST.read_text())
DOORS = sorted(LIST.doors)


def sources_of(version: str) -> Readable:
    """Skips the test without them."""
    if version == "installed":
        return installed()
    if not (CACHE / f"vllm-{version}").exists():
        pytest.skip(f"the sources of vLLM {version} were not fetched: make check")
    return exact(version, CACHE)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Texts are parsed once, without garbage collection."""
    monkeypatch.setattr(definitions.ast, "parse", functools.lru_cache(400)(ast.parse))
    gc.disable()
    yield
    gc.enable()


# ----------------------------------------------------------------------------------- what is broken


def path_of(source: Readable, module: str) -> str:
    path = f"{module.replace('.', '/')}.py"
    return path if source.read(path) is not None else path.replace(".py", "/__init__.py")


def renamed(source: Readable, names: Sources, module: str, name: str) -> Changed:
    """A member is renamed in all base classes too."""
    first, _, member = name.partition(".")
    found = names.find(f"{module}.{first}")
    assert found is not None
    texts: dict[str, str | None] = {}
    if not member:
        path = path_of(source, module)
        if first not in (source.read(path) or ""):
            # It comes by `import *`: renamed where it is defined.
            path = path_of(source, found.module)
        texts[path] = re.sub(rf"\b{first}\b", f"{first}_x", source.read(path) or "")
        if names.module(f"{module}.{first}") is not None:
            texts[path_of(source, f"{module}.{first}")] = None
        return Changed(source, texts)
    for one in names.bases(found):
        path = path_of(source, one.module)
        lines = (texts.get(path) or source.read(path) or "").splitlines(keepends=True)
        inside = slice(one.node.lineno - 1, one.node.end_lineno)  # type: ignore[attr-defined]
        lines[inside] = [re.sub(rf"\b{member}\b", f"{member}_x", line) for line in lines[inside]]
        texts[path] = "".join(lines)
    return Changed(source, texts)


def definition(names: Sources, module: str, name: str) -> Definition | None:
    first, _, member = name.partition(".")
    found = names.find(f"{module}.{first}")
    return names.member(found, member) if member and found is not None else found


def with_node(source: Readable, found: Definition, new: Any) -> Changed:
    """Its decorators stay."""
    node: Any = found.node
    path = path_of(source, found.module)
    lines = (source.read(path) or "").splitlines(keepends=True)
    indent = " " * node.col_offset
    text = ast.unparse(new).splitlines()
    lines[node.lineno - 1 : node.end_lineno] = [f"{indent}{line}\n" for line in text]
    return Changed(source, {path: "".join(lines)})


def broken(
    source: Readable, names: Sources, module: str, name: str, form: Form
) -> Iterator[tuple[str, Changed]]:
    """form: what hotkv relies on."""
    found = definition(names, module, name)
    yield "renamed", renamed(source, names, module, name)
    assert found is not None
    node: Any = found.node
    called, of_call = node, found
    if isinstance(node, ast.ClassDef) and form.calls:
        of_call = names.member(found, "__init__") or found
        called = of_call.node

    def other(change: Any, of: Any = called, place: Definition = of_call) -> Changed:
        new = copy.deepcopy(of)
        if hasattr(new, "decorator_list"):
            new.decorator_list = []
        change(new)
        return with_node(source, place, new)

    def one_by_name(new: Any) -> None:
        new.args.kwonlyargs.append(ast.arg("newly"))
        new.args.kw_defaults.append(ast.Constant(None))

    if isinstance(called, FunctionDef) and (form.calls or form.signature):
        is_bound = "." in name or called is not node
        place = int(is_bound and kind_of(called) != "staticmethod")
        yield "one more parameter", other(lambda new: new.args.args.insert(place, ast.arg("newly")))
    if isinstance(called, FunctionDef) and form.signature:
        yield "one more parameter by name", other(one_by_name)
    if isinstance(called, ast.ClassDef) and form.calls:
        field = ast.parse("newly: int").body[0]
        yield "one more field", other(lambda new: new.body.insert(0, field))
    if form.gives and isinstance(node, FunctionDef):
        yield "gives another type", other(lambda new: setattr(new, "returns", INT), node, found)
    if form.gives and isinstance(node, ast.AnnAssign) and hasattr(node, "lineno"):
        yield "is of another type", other(lambda new: setattr(new, "annotation", INT), node, found)


INT = ast.Name("int")


USES = {
    (module, name, str(forms)): forms
    for door in LIST.doors.values()
    for module, entries in door.items()
    for name, forms in entries.items()
}
"""Forms by name; several if versions differ. Equal uses of both doors count once."""


def compared(source: Readable, some: ApiUses) -> list[str]:
    return list(uses.changed_uses(source, Sources(source, is_whole=False), OWN, some))


@pytest.mark.parametrize(
    "of, every",
    [
        ("installed", 8),
        pytest.param("installed", 1, marks=pytest.mark.long),
        pytest.param(LIST.made_from[-1], 1, marks=pytest.mark.long),
    ],
)
def test_each_use_that_is_broken_is_named(of: str, every: int, quick: None) -> None:
    source = Once(sources_of(of))
    names = Sources(source, is_whole=True)
    num_broken, wrong = 0, []
    some = list(USES.items())[::every]
    for (module, name, _), forms in some:
        if definition(names, module, name) is None:
            assert None in forms, name
            continue
        form = next(form for form in reversed(forms) if form is not None)
        # Alone: reports would be merged.
        alone = replace(LIST, doors={OWN: {module: {name: forms}}})
        assert not compared(source, alone), name
        for what, changed in broken(source, names, module, name, form):
            found = compared(changed, alone)
            num_broken += 1
            is_named = any(name.rpartition(".")[2] in line for line in found)
            if None in forms and what == "renamed":
                # Some supported version lacks it.
                is_named = not found
            if not is_named:
                wrong.append((module, name, what, found))
    assert not wrong, (len(wrong), wrong[:5])
    assert num_broken > 1.2 * len(some)


# ------------------------------------------------------------------------------ beside single names

REGISTRY = "vllm/v1/attention/backends/registry.py"
SPECS, CORE = "vllm/v1/kv_cache_interface.py", "vllm/v1/engine/core.py"
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
LOGGER, SPEC = "\nlogger = ", "\nclass PagedSpec(FullAttentionSpec): ...\n"
ABSTRACT = "    @abstractmethod\n    def wait_for_save(self"
COUNT = "    @abstractmethod\n    def count(self): ...\n"
SLEEP, FORGET = "    def sleep(self", "    def forget(self):\n        self._reset_caches()\n"
KEY, VALUE = "    key: torch.Tensor,\n", "    value: torch.Tensor,\n"
CACHES = "    key_cache: torch.Tensor,\n    value_cache: torch.Tensor,\n"
CACHES += "    slot_mapping: torch.Tensor,\n    isa: str,"
LATER = [
    (SPECS, LOGGER, SPEC + LOGGER, "PagedSpec is a KV cache spec that nobody"),
    (REGISTRY, "    CPU_ATTN = ", '    NEW = "a"\n    CPU_ATTN = ', "NEW is an attention backend"),
    (REGISTRY, "    MAMBA1 = ", '    NEW = "a"\n    MAMBA1 = ', "NEW is an attention backend"),
    (BASE, ABSTRACT, COUNT + ABSTRACT, "KVConnectorBase_V1 asks for count"),
    (CORE, SLEEP, FORGET + SLEEP, "called by _finish_pause, forget, release_kv_cache_memory"),
    ("vllm/_custom_ops.py", KEY + VALUE + CACHES, VALUE + KEY + CACHES, "takes value in the place"),
]


@pytest.mark.parametrize("change", LATER, ids=lambda change: change[3])
def test_what_a_later_version_may_change_besides(change: tuple[str, str, str, str]) -> None:
    (found,) = answer(OWN, "0.99.0", Replaced(installed(), [change])).changed or ()
    assert change[3] in found


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("of", ["installed", *LIST.made_from])
def test_untouched_sources_of_an_unknown_version_check_out(of: str, door: str) -> None:
    found = answer(door, "0.99.0", sources_of(of))
    assert found.is_on and found.num_uses > 50, found


CONFIG = "@dataclass\nclass KVCacheConfig:"
MARGIN = 'TEXT = """\nclass KVCacheConfig:\n    pass\n"""\n'
LAYOUTS = {
    "code at the margin of a text": lambda text: text.replace(CONFIG, MARGIN + CONFIG),
    "four columns become two": lambda text: re.sub(
        r"^ +", lambda found: " " * (len(found[0]) // 2), text, flags=re.MULTILINE
    ),
    "one statement": lambda text: "if True:\n" + textwrap.indent(text, "    "),
}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_the_layout_of_a_file_changes_nothing(layout: str) -> None:
    """The check splits files by lines."""
    text = LAYOUTS[layout](installed().read(SPECS) or "")
    ast.parse(text)
    changed = Changed(installed(), {SPECS: text})
    assert answer(OWN, "0.99.0", changed).changed == ()
    gone = Changed(installed(), {SPECS: text.replace("hash_block_size", "hash_size")})
    said = ("KVCacheConfig has no attribute hash_block_size",)
    assert answer(OWN, "0.99.0", gone).changed == said


def test_the_bodies_of_methods_are_left_out() -> None:
    text = textwrap.dedent("""
        class One:
            size: int = 3

            def short(self, of: str = "x:") -> None:  # a remark
                raise OSError

            async def long(
                self,
                first: int,
            ) -> dict[str, int]:
                raise OSError

            last = size
    """)
    assert "OSError" not in definitions.without_bodies(text)
    want = ast.parse(text.replace("raise OSError", "..."))
    assert ast.dump(ast.parse(definitions.without_bodies(text))) == ast.dump(want)


def test_sources_that_can_not_be_read_mean_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("class Request(:\n", "\0"):
        found = answer(OWN, "0.99.0", Changed(installed(), {"vllm/v1/request.py": text}))
        assert not found.is_on and "its sources can't be read" in str(found)
    monkeypatch.setattr(uses, "installed", lambda: None)
    assert "its sources can't be found" in str(answer(OWN, "0.99.0"))
    monkeypatch.setattr(uses, "LIST", tmp_path / "uses.json")
    assert "its sources can't be read" in str(answer(OWN, "0.99.0", installed()))


# --------------------------------------------------------------------------------------- the engine


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    versions._answer.cache_clear()
    yield
    versions._answer.cache_clear()


def lines(caplog: Any) -> list[str]:
    """Lines of other threads are left out."""
    return [one.getMessage() for one in caplog.records if one.name == versions.logger.name]


def test_a_tested_version_reads_no_source(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(uses, "installed", lambda: 1 // 0)
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
    without = Changed(installed(), {"vllm/v1/request.py": "class Request:\n    pass\n"})
    monkeypatch.setattr(uses, "installed", lambda: without)
    why = versions.why_off(OWN, False)
    assert re.fullmatch(
        rf"it is tested with vLLM 0\.32 to 0\.33, and this is {re.escape(version)}: "
        r"(Request has no attribute \w+; ){3}"
        r"and \d+ more; set hotkv.allow_untested_vllm to use it nevertheless",
        why,
    ), why
    assert versions.why_off(OWN, True) == ""
