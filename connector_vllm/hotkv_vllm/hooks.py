"""The edge between vLLM and the connector: no exception of hotkv passes it.

Each hook names its fallback, whose answer vLLM gets if the hook raises; `fallbacks` says why that
is safe. What is always true: a hook that raises is counted and answered by its fallback; a fallback
that raises too is counted and answered by `last`, which is a constant. A fallback shares as little
state as it can with its hook, so that one fault does not break both.
"""

import functools
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol, TypeVar, cast

from hotkv_vllm import link
from hotkv_vllm.fallbacks import FALLBACKS

logger = link.logger
T = TypeVar("T")

HOOKS: dict[str, FunctionType] = {}
"""The guarded function of each hook, by name."""


class Clock(Protocol):
    """Takes down the time of hooks."""

    def add(self, hook: str, seconds: float) -> None: ...


class HookEdge:
    """The edge of one connector. `broken`: hooks that have raised. `count`: adds one to a
    counter."""

    def __init__(self, clock: Clock, count: Callable[[str], None]) -> None:
        self.clock = clock
        self.broken: set[str] = set()
        self._count = count

    def __repr__(self) -> str:
        return f"HookEdge(broken: {sorted(self.broken)})"

    def broke(self, name: str) -> None:
        """Counts a hook's fault, and logs its first one with the traceback."""
        self._count("hook_errors")
        if name not in self.broken:
            self.broken.add(name)
            logger.exception("hotkv: hook %s broke; the engine goes on without its result", name)


def hook(
    otherwise: Callable[..., Any], *, last: Any = None, is_part: bool = False
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Times a hook and keeps its exceptions from vLLM.

    If the hook raises, `otherwise(self, *its arguments)` answers. The object has a HookEdge `edge`.

    `is_part`: the method is part of a hook that is timed itself, and that goes on if the part
    raises.
    """

    def wrap(method: Callable[..., T]) -> Callable[..., T]:
        name = method.__name__
        _add(name, method)

        @functools.wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> T:
            began_s = time.perf_counter()
            try:
                return method(self, *args, **kwargs)
            except Exception:  # noqa: BLE001 - hook edge: a fault of ours must not become the engine's
                self.edge.broke(name)
            finally:
                if not is_part:
                    self.edge.clock.add(name, time.perf_counter() - began_s)
            return _answer(self, name, otherwise, last, args, kwargs)

        return guarded

    return wrap


def _add(name: str, method: Callable[..., Any]) -> None:
    assert name in FALLBACKS, f"nobody has said what makes the fallback of {name} safe"
    HOOKS[name] = cast(FunctionType, method)


def _answer(
    self: Any, name: str, otherwise: Callable[..., Any], last: Any, args: Any, kwargs: Any
) -> Any:
    try:
        return otherwise(self, *args, **kwargs)
    except Exception:  # noqa: BLE001 - hook edge, as above
        self.edge.broke(f"{name} (its fallback)")
        return last


def class_hook(
    otherwise: Callable[..., Any], last: Any = None
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Does the same for methods that vLLM calls on the class, before there is a connector.

    Faults are logged; nothing is timed or counted. `last` is the answer if the fallback breaks too;
    None is what vLLM's own base class answers.
    """

    def wrap(method: Callable[..., T]) -> Callable[..., T]:
        _add(method.__name__, method)

        @functools.wraps(method)
        def guarded(cls: type, *args: Any, **kwargs: Any) -> T:
            try:
                return method(cls, *args, **kwargs)
            except Exception:
                logger.exception(
                    "hotkv: hook %s broke; the engine goes on without its result", method.__name__
                )
            try:
                answer: T = otherwise(cls, *args, **kwargs)
            except Exception:
                logger.exception("hotkv: the fallback of hook %s broke, too", method.__name__)
                answer = last
            return answer

        return guarded

    return wrap


def nothing(*_: Any, **__: Any) -> None:
    """The fallback of hooks whose result nobody needs."""
