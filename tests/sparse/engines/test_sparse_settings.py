"""The settings of sparse decode and residency."""

from dataclasses import fields
from typing import Any

import pytest

from hotkv_sparse.vllm.settings import (
    SparseSettings,
    cuda_settings,
    is_sparse_configured,
    resident_settings,
)
from hotkv_vllm import companion
from hotkv_vllm.config import DEFAULT_TARGET, ConfigError, ConnectorConfig


def test_the_seam_names_the_settings() -> None:
    assert {field.name for field in fields(SparseSettings)} == {*companion.SETTINGS}


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("hotkv.sparse", 5, "an object"),
        ("hotkv.sparse", {"dense_layers": 5}, "wrong type"),
        ("hotkv.sparse_centre", "/means", "set hotkv.sparse too"),
        ("hotkv.sketch_tokens", 1 << 63, "64 bits"),
        ("hotkv.sparsity", {}, "hotkv.sparse, "),
    ],
)
def test_wrong_setting_names_key_value_and_choices(setting: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as error:
        ConnectorConfig.from_extra_config({setting: value})
    assert all(text in str(error.value) for text in (setting, repr(value), allowed))


def test_settings_of_arguments_with_dots() -> None:
    given = {"hotkv": {"sparse": {"sparse_topk": 0.5}}}
    config: Any = ConnectorConfig.from_extra_config(given).companion
    assert config.sparse.sparse_topk == 0.5 and not config.needs_delivery
    assert config.sparse.scorer == "mix2"
    resident = {"hotkv": {"sparse": {"residency": "host"}, "allow_sparse_cuda": True}}
    assert is_sparse_configured(given) and resident_settings(given) is None
    assert resident_settings(resident) is not None and cuda_settings(resident) is not None
    config = ConnectorConfig.from_extra_config(resident).companion
    assert config.needs_delivery and config.cuda_layout == "LBHNC"
    assert config.sparse.scorer == "rot2u"


def test_settings_beside_sparse_ask_for_nothing() -> None:
    assert ConnectorConfig.from_extra_config({"hotkv.sketch_tokens": 4}).companion is None


@pytest.mark.parametrize("residency", ["host", "auto"])
@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [("hotkv.target", "node7:50051", "unix:/absolute/path"), ("hotkv.use_table", False, "true")],
)
def test_residency_needs_a_mapping_engine(
    residency: str, setting: str, value: Any, allowed: str
) -> None:
    extra = {"hotkv.target": DEFAULT_TARGET, "hotkv.sparse": {"residency": residency}}
    assert ConnectorConfig.from_extra_config(extra).companion.is_resident
    with pytest.raises(ConfigError) as error:
        ConnectorConfig.from_extra_config(extra | {setting: value})
    words = (setting, repr(value), "hotkv.sparse.residency", allowed)
    assert all(text in str(error.value) for text in words)
    ConnectorConfig.from_extra_config(extra | {setting: value, "hotkv.sparse": {}})
