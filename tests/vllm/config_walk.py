"""Other values for each field of vLLM's config."""

import dataclasses
import enum
import typing
from collections.abc import Iterator
from typing import Any


def config_objects(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, config
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        is_object = dataclasses.is_dataclass(value) and not isinstance(value, type)
        if is_object and not hasattr(value, "to_dict"):
            yield from config_objects(value, f"{path}{field.name}.")


def other_values(kind: type, name: str, value: Any) -> list[Any]:
    """By the declared type; may be empty."""
    found = []
    for hint in _choices(typing.get_type_hints(kind).get(name, Any)):
        if hint is bool:
            found.append(not value)
        elif typing.get_origin(hint) is typing.Literal:
            found += [choice for choice in typing.get_args(hint) if choice != value][:1]
        elif isinstance(hint, type) and issubclass(hint, enum.Enum):
            found += [member for member in hint if member is not value][:1]
        elif hint in (int, float) and not isinstance(value, bool | str):
            found.append(hint((value or 0) + 1))
        elif hint is str:
            found.append(f"{value}-other" if isinstance(value, str) else "other")
    return found


def _choices(hint: Any) -> Iterator[Any]:
    is_union = typing.get_origin(hint) is typing.Union or type(hint).__name__ == "UnionType"
    for part in typing.get_args(hint) if is_union else (hint,):
        if part is not type(None):
            # The type itself.
            is_annotated = typing.get_origin(part) is typing.Annotated
            yield from _choices(typing.get_args(part)[0]) if is_annotated else (part,)
