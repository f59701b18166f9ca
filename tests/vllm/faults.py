"""Injects exceptions into any function of hotkv, to test that no exception reaches vLLM. Also lists
the functions that the connector's callbacks call (a callback is a connector method that vLLM
calls).

A fault replaces the function's code object, so it reaches every caller, even one that keeps a
reference to the function.
"""

import contextlib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import hotkv_vllm
from hotkv_client.testing import fake
from hotkv_vllm import callbacks

EDGE = {
    "HotKVConnector._count",
    "CallbackEdge.broke",
    "_answer",
    "HotKVScheduler.count",
    "HotKVWorker.count",
    "RankReport.count",
    "StepReport.count",
    "HotKVStats.add",
}
"""Functions that must not be broken: those of `CallbackEdge`, which catches the exceptions of
callbacks, and those that count exceptions. `functions` leaves them out."""


class InjectedFault(RuntimeError):
    """The exception that a broken function raises."""


class _Fault:
    """A function that raises `InjectedFault` instead of running. `strikes` counts how often it
    raised."""

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
    """Makes `function` raise `InjectedFault` within the context; with `only_once`, only at its next
    call."""
    fault = _Fault(function, only_once)
    _now.append(fault)
    function.__code__ = _broken.__code__
    try:
        yield fault
    finally:
        fault.mend()
        _now.remove(fault)


def functions() -> dict[CodeType, FunctionType]:
    """Returns, by code object, the functions and methods of `hotkv_vllm` and the public methods of
    `FakeSession`."""
    found: dict[CodeType, FunctionType] = {}
    for _, name, _ in pkgutil.walk_packages(hotkv_vllm.__path__, "hotkv_vllm."):
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


OWN = sorted(name for name in callbacks.FALLBACKS if "." not in name)
"""The callbacks (methods that vLLM calls) of HotKVConnector. The names of the other connector's
callbacks have a prefix ("part.")."""


def called_by_callbacks(run: Callable[[], None]) -> dict[str, set[FunctionType]]:
    """Calls `run` under a profiler. Returns, for each callback (connector method that vLLM calls),
    the hotkv functions that it has called, including itself."""
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
