"""Residency leaves the key space as it is: only exact blocks are shared."""

import copy
import dataclasses
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hotkv_sparse.vllm.block_manager import ResidentSpec
from hotkv_vllm.compat.fingerprint import HARMLESS, key_space_factors
from tests.sparse.engines.resident_engine import spec_of
from tests.vllm.test_fingerprint import Changed, config

__all__ = ["config"]
"""A fixture."""


@pytest.mark.parametrize("residency", ["host", "auto"])
def test_residency_leaves_the_key_space_as_it_is(config: Any, residency: str) -> None:
    resident = spec_of(residency)
    fields = [field.name for field in dataclasses.fields(FullAttentionSpec) if field.init]
    dense = FullAttentionSpec(**{name: getattr(resident, name) for name in fields})
    assert key_space_factors(config, {"a": dense}) == key_space_factors(config, {"a": resident})


def test_only_inherited_fields_are_in_the_key_space(config: Any) -> None:
    own = {field.name for field in dataclasses.fields(ResidentSpec)}
    own -= {field.name for field in dataclasses.fields(FullAttentionSpec)}
    assert own == ResidentSpec.HARMLESS_FIELDS
    spec = spec_of("host")
    for field in dataclasses.fields(spec):
        other = copy.copy(spec)
        other.__dict__[field.name] = Changed()
        is_same = key_space_factors(config, {"a": spec}) == key_space_factors(config, {"a": other})
        assert is_same == (field.name in HARMLESS["KVCacheSpec"] | own)
