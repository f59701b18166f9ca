"""A figure of an estimate: a number that knows its unit and the formula it comes from."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from hotkv_proto.errors import HotKVError, Reason

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, slots=True)
class Figure:
    """`unit`: bytes, or a plural noun that is counted. `formula`: how `value` is made,
    with its numbers filled in."""

    value: float
    unit: str
    formula: str

    def __str__(self) -> str:
        if self.unit == "bytes":
            return human_bytes(self.value)
        return f"{self.value:,.0f} {self.unit}"


def figures_of(owner: "DataclassInstance") -> dict[str, Figure]:
    """The figures among a dataclass's fields, by name."""
    found = {item.name: getattr(owner, item.name) for item in fields(owner)}
    return {name: value for name, value in found.items() if isinstance(value, Figure)}


def human_bytes(value: float) -> str:
    """In the largest binary unit that leaves a number of at least one."""
    for unit in _BINARY[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_BINARY[-1]}"


def refuse(name: str, value: object, fix: str) -> HotKVError:
    """The error for a field: its name, its value and what to write instead."""
    return HotKVError(Reason.INVALID_FIELD, f"{name} is {value!r}; {fix}")


def check_count(name: str, value: object, least: int = 1) -> None:
    """INVALID_FIELD unless `value` is an integer from `least` up."""
    if type(value) is not int or value < least:
        raise refuse(name, value, f"use an integer from {least} up")


def check_number(
    name: str, value: object, *, above: float = 0.0, most: float = float("inf")
) -> None:
    """INVALID_FIELD unless `value` is a finite number above `above`, and at most `most`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not above < value < float("inf")
        or value > most
    ):
        limit = f", at most {most:g}" if most != float("inf") else ""
        raise refuse(name, value, f"use a number above {above:g}{limit}")
