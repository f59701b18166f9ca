"""Makes any function of hotkv raise. Replacing the code object reaches every caller, even one
that keeps a reference."""

import contextlib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from hotkv_vllm import callbacks
from tests.doubles import fake

EDGE = {
    "HotKVConnector._count",
    "CallbackEdge.broke",
    "_answer",
    "HotKVScheduler.count",
    "HotKVWorker.count",
    "RankReporter.count",
    "StepReport.count",
    "HotKVStats.add",
}
"""They catch and count exceptions."""


class InjectedFault(RuntimeError): ...


class _Fault:
    def __init__(self, function: FunctionType, only_once: bool) -> None:
        self.function, self.only_once, self.original = function, only_once, function.__code__
        self.strikes = 0

    def strike(self) -> None:
        self.strikes += 1
        if self.only_once:
            self.mend()
        raise InjectedFault(f"{self.function.__qualname__} is told to break")

    def mend(self) -> None:
        self.function.__code__ = self.original


_now: list[_Fault] = []


def strike() -> None:
    _now[-1].strike()


def _broken(*_: Any, **__: Any) -> None:
    __import__("importlib").import_module("tests.vllm.faults").strike()


@contextlib.contextmanager
def broken(function: FunctionType, *, only_once: bool = False) -> Iterator[_Fault]:
    fault = _Fault(function, only_once)
    _now.append(fault)
    function.__code__ = _broken.__code__
    try:
        yield fault
    finally:
        fault.mend()
        _now.remove(fault)


def modules() -> Iterator[str]:
    """Of the connector and of its companion, if there is one."""
    for package in ("hotkv_vllm", "hotkv_sparse.vllm"):
        with contextlib.suppress(ModuleNotFoundError):
            folders = importlib.import_module(package).__path__
            yield from (name for _, name, _ in pkgutil.walk_packages(folders, f"{package}."))


def functions() -> dict[CodeType, FunctionType]:
    """Also the public methods of `FakeSession`."""
    found: dict[CodeType, FunctionType] = {}
    for name in modules():
        if "plugin" in name:
            continue
        module = importlib.import_module(name)
        classes = [one for one in vars(module).values() if inspect.isclass(one)]
        for owner in (module, *(one for one in classes if one.__module__ == name)):
            for one in list(vars(owner).values()):
                _add(found, one, name)
    for one in vars(fake.FakeSession).values():
        if not getattr(one, "__name__", "_").startswith("_"):
            _add(found, one, fake.__name__)
    return found


def _add(found: dict[CodeType, FunctionType], one: Any, module: str) -> None:
    one = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
    one = inspect.unwrap(one) if callable(one) else one
    if not isinstance(one, FunctionType) or one.__module__ != module or one.__code__.co_freevars:
        return
    if (
        not one.__code__.co_filename.startswith("<")
        and one.__qualname__ not in EDGE
        and not one.__name__.startswith("__")
    ):
        found[one.__code__] = one


# A companion's modules add their fallbacks.
for _name in modules():
    importlib.import_module(_name)
OWN = sorted(name for name in callbacks.FALLBACKS if "." not in name)
"""The other door's callbacks have a prefix ("part.")."""


def called_by_callbacks(run: Callable[[], None]) -> dict[str, set[FunctionType]]:
    """Functions by callback, which are included themselves."""
    known, stack = functions(), list[str]()
    guarded = {function.__code__: name for name, function in callbacks.CALLBACKS.items()}
    calls: dict[str, set[FunctionType]] = {name: set() for name in OWN}

    def profile(frame: Any, event: str, _: Any) -> None:
        callback = guarded.get(frame.f_code)
        if event == "call":
            if callback is not None:
                stack.append(callback)
            if stack and frame.f_code in known:
                calls[stack[-1]].add(known[frame.f_code])
        elif event == "return" and callback is not None and stack:
            stack.pop()

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls
