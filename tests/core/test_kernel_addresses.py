"""Tests that no kernel uses an address of an array that numba has freed: numba frees a local
array after the last line that names it, even if its `ctypes.data` is used later. Arguments are
safe: the caller holds them.
"""

import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import pytest
from numba.core import compiler, ir
from numba.core.registry import CPUDispatcher

import hotkv_proto
import hotkv_server
import hotkv_sparse

VIEWS = ("view", "reshape", "T")
NUMBERS = ("uint64", "int64", "intp")


def kernels() -> Iterator[Any]:
    for package in (hotkv_proto, hotkv_server, hotkv_sparse):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.endswith("kernels"):
                for one in vars(importlib.import_module(module.name)).values():
                    if isinstance(one, CPUDispatcher) and one.py_func.__module__ == module.name:
                        yield one.py_func


class Addresses:
    """What variables hold, by numba's intermediate code.

    arrays: kept alive by each variable.
    addresses: for each address, the arrays that it points into.
    """

    def __init__(self, function: Any) -> None:
        self.blocks = compiler.run_frontend(function, emit_dels=True).blocks
        self.arrays: dict[str, set[str]] = defaultdict(set)
        self.addresses: dict[str, set[str]] = defaultdict(set)
        self._attributes: dict[str, str] = {}
        assigns = [
            one
            for block in self.blocks.values()
            for one in block.body
            if isinstance(one, ir.Assign)
        ]
        known = -1
        while known != (known := self._num_known()):
            for one in assigns:
                self._learn(one.target.name, one.value)

    def _num_known(self) -> int:
        return sum(map(len, (*self.arrays.values(), *self.addresses.values())))

    def _learn(self, name: str, value: Any) -> None:
        if isinstance(value, ir.Var):
            self.arrays[name] |= self.arrays[value.name]
            self.addresses[name] |= self.addresses[value.name]
        elif not isinstance(value, ir.Expr):
            return
        elif value.op == "getattr":
            self._attributes[name] = value.attr
            if value.attr == "data":
                self.addresses[name] |= self.arrays[value.value.name]
            elif value.attr in ("ctypes", *VIEWS):
                self.arrays[name] |= self.arrays[value.value.name]
        elif value.op == "call":
            attribute = self._attributes.get(value.func.name)
            if attribute in VIEWS:
                self.arrays[name] |= self.arrays[value.func.name]
            elif attribute in NUMBERS:
                self.addresses[name] |= self.addresses[value.args[0].name]
            else:
                self.arrays[name].add(name)
        else:
            is_part = value.op in ("getitem", "static_getitem")
            for operand in [value.value] if is_part else value.list_vars():
                self.addresses[name] |= self.addresses[operand.name]
                if is_part or value.op in ("build_tuple", "exhaust_iter"):
                    self.arrays[name] |= self.arrays[operand.name]

    def late_uses(self) -> set[str]:
        """Lines (file:line) that use an address of an array that nothing keeps alive."""
        alive: dict[int, set[str]] = {min(self.blocks): set()}
        found, todo = set[str](), [min(self.blocks)]
        while todo:
            label = todo.pop()
            now = set(alive[label])
            for one in self.blocks[label].body:
                if isinstance(one, ir.Del):
                    now.discard(one.value)
                    continue
                held = set[str]().union(*(self.arrays[name] for name in now))
                for used in one.list_vars():
                    if isinstance(one, ir.Assign) and used.name == one.target.name:
                        continue
                    if not self.addresses[used.name] <= held:
                        found.add(str(one.loc))
                if isinstance(one, ir.Assign):
                    now.add(one.target.name)
            for after in self.blocks[label].terminator.get_targets():
                before = alive.get(after)
                alive[after] = now if before is None else before & now
                if alive[after] != before:
                    todo.append(after)
        return found


@numba.njit
def copied(address: Any) -> Any:
    return address


def use_after_free(count: Any) -> Any:
    words = np.zeros(count)
    at = words.ctypes.data + 8
    for _ in range(3):
        copied(at)


def use_in_a_loop(count: Any) -> Any:
    words = np.zeros(count)
    at = words.view(np.int64).ctypes.data
    for i in range(3):
        words[i] = copied(at)


def use_of_an_argument(words: Any, first: Any) -> Any:
    at = words[first:].ctypes.data
    return copied(at)


def use_in_the_last_line(count: Any) -> Any:
    words = np.zeros(count)
    words[0] = 1
    copied(words.ctypes.data)


@pytest.mark.parametrize(
    ("function", "is_wrong"),
    [
        (use_after_free, True),
        (use_in_the_last_line, True),
        (use_in_a_loop, False),
        (use_of_an_argument, False),
    ],
)
def test_uses_after_the_end_are_found(function: Any, is_wrong: bool) -> None:
    assert bool(Addresses(function).late_uses()) == is_wrong


def test_no_kernel_uses_freed_memory() -> None:
    functions = list(kernels())
    assert len(functions) > 80
    assert [one for function in functions for one in Addresses(function).late_uses()] == []
