"""Settings, start, what turns hotkv off, cost per step."""

import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.triton_utils.dispatcher import register_kernels

from bench.e2e import CALLBACKS, hook_share
from hotkv_client import Credentials
from hotkv_vllm import companion, counter_help, link
from hotkv_vllm.compat import Unsupported, kv_groups, reuse
from hotkv_vllm.config import DEFAULT_TARGET, GONE, ConfigError, ConnectorConfig
from hotkv_vllm.offloading.connector import complete
from hotkv_vllm.offloading.tier import BY_CONNECTOR
from hotkv_vllm.stats import HotKVStats
from hotkv_vllm.worker import layout
from tests.vllm.harness import prompt

PROMPT = prompt(1, 200)


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("hotkv.target", "grpc.sock", "unix:/absolute/path and host:port"),
        ("hotkv.target", "unix:relative", "unix:/absolute/path"),
        ("hotkv.target", "host:65536", "host:port"),
        ("hotkv.target", "host:0", "host:port"),
        ("hotkv.target", "host:٧٧", "host:port"),
        ("hotkv.target", ":7", "host:port"),
        ("hotkv.target", "http://host:1", "host:port"),
        ("hotkv.target", 7, "a string"),
        ("hotkv.load_timeout_s", "soon", "seconds"),
        ("hotkv.load_timeout_s", -1, "seconds"),
        ("hotkv.load_timeout_s", 86400, "seconds"),
        ("hotkv.load_timeout_s", True, "seconds"),
        ("hotkv.tracing_sample_ratio", True, "from 0 to 1"),
        ("hotkv.tracing", 5, "https://"),
        ("hotkv.load", "never", "auto, always"),
        ("hotkv.device_order", "soon", "events, flags"),
        ("hotkv.max_inflight_store_mib", -1, "whole number"),
        ("hotkv.max_inflight_store_mib", 1.5, "whole number"),
        ("hotkv.max_inflight_store_mib", True, "whole number"),
        *(
            (f"hotkv.{name}", 1, f"it is no setting any more: {now}; remove it")
            for name, now in GONE.items()
        ),
        ("hotkv.use_table", "yes", "true and false"),
        ("hotkv.targt", "x", "hotkv.target"),
        ("hotkv.tls_certificate", "/engine.pem", "hotkv.tls_key = None: set both"),
        ("hotkv.tls_key", "/engine.key", "set both"),
    ],
)
def test_wrong_setting_names_key_value_and_choices(setting: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as error:
        ConnectorConfig.from_extra_config({setting: value})
    assert all(text in str(error.value) for text in (setting, repr(value), allowed))


def test_settings_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTKV_TARGET", raising=False)
    assert ConnectorConfig.from_extra_config({"other": 1}).target == DEFAULT_TARGET
    monkeypatch.setenv("HOTKV_TARGET", "node7:50051")
    files = {"tls_ca": "/ca", "tls_certificate": "/one", "tls_key": "/key", "token_file": "/token"}
    given: dict[str, Any] = {"load_timeout_s": 3, "use_table": False, "max_inflight_store_mib": 0}
    given |= {"device_order": "flags", "tracing_sample_ratio": 0, "reset_timeout_s": 0, **files}
    config = ConnectorConfig.from_extra_config({f"hotkv.{key}": given[key] for key in given})
    assert config.target == "node7:50051" and config.credentials == Credentials(**files)
    assert {name: getattr(config, name) for name in given} == given


def test_settings_of_arguments_with_dots() -> None:
    """vLLM makes nested objects of them."""
    given = {"hotkv": {"load": "always"}, "hotkv.tenant": "a"}
    config = ConnectorConfig.from_extra_config(given)
    assert (config.load, config.tenant) == ("always", "a")
    completed: dict[str, Any] = {"hotkv": {"tenant": "a"}, "cpu_bytes_to_use": 1}
    assert complete(completed) is not None
    assert completed["secondary_tiers"][0]["hotkv.tenant"] == "a"


def test_connector_opens_the_named_tiers_session() -> None:
    """Users name the tier to put it before another."""
    tier = {"type": "HotKVTier", "module_path": "hotkv_vllm.offloading.tier"}
    extra: dict[str, Any] = {"hotkv.tenant": "a", "secondary_tiers": [dict(tier), {"type": "fs"}]}
    for _ in range(2):
        assert complete(extra) is not None
        assert extra["secondary_tiers"] == [
            tier | {"hotkv.tenant": "a", BY_CONNECTOR: True},
            {"type": "fs"},
        ]
    with pytest.raises(ConfigError, match=r"hotkv\.weights_identity = 'w' in secondary_tiers"):
        complete({"secondary_tiers": [{**tier, "hotkv.weights_identity": "w"}]})


def test_a_companion_that_is_absent_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companion, "PACKAGE", "hotkv_absent.vllm")
    config = ConnectorConfig.from_extra_config({"hotkv.load": "always"})
    assert config.companion is None and counter_help.every_counter() == counter_help.COUNTERS
    with pytest.raises(ConfigError, match=r"hotkv\.sparse = \{\}: .*pip install"):
        ConnectorConfig.from_extra_config({"hotkv.sparse": {}})
    companion.register()


def test_a_companion_that_breaks_is_no_absent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companion, "PACKAGE", "hotkv_vllm")
    with pytest.raises(ModuleNotFoundError, match="absent"):
        companion.part("absent")


def test_an_offloading_without_tiers_is_refused() -> None:
    with pytest.raises(ConfigError, match="CPUOffloadingSpec"):
        complete({"spec_name": "CPUOffloadingSpec"})
    assert complete({"spec_name": "Own", "spec_module_path": "own"}) is not None


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"hotkv": "always"}, "hotkv = 'always': allowed is an object"),
        ({"hotkv": {"load": "auto"}, "hotkv.load": "auto"}, "hotkv.load is set twice"),
        ({"hotkv": {"lod": "auto"}}, "hotkv.lod = 'auto': there is no such setting"),
    ],
)
def test_wrong_settings_of_arguments_with_dots(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        ConnectorConfig.from_extra_config(extra)


def test_a_wrong_setting_is_an_error_at_construction(engine: Any) -> None:
    with pytest.raises(ConfigError):
        engine(extra={"target": "nonsense"})


@pytest.mark.filterwarnings("ignore:.*torch.distributed:FutureWarning")
def test_kernels_are_loaded_before_the_first_request(engine: Any) -> None:
    """vLLM's `register_kernels` reads all attributes of all modules."""
    pytest.importorskip("numba")
    engine()
    assert "hotkv_proto.table_reading" in sys.modules
    register_kernels({})


def raising(error: Exception) -> Any:
    def refuse(*_: Any) -> Any:
        raise error

    return refuse


FULL_DISK = os.statvfs_result((4096, 4096, 9, 0, 0, 0, 0, 0, 0, 0))
TROUBLES: dict[str, tuple[Any, str, Any]] = {
    "no such call": (layout, "getattr", lambda *_: None),
    "no room": (os, "statvfs", lambda _: FULL_DISK),
    "wrong place": (layout, "_check_placement", raising(Unsupported("misplaced"))),
    "groups": (kv_groups, "cache_groups", raising(Unsupported("pipeline"))),
    "no reuse": (reuse, "check_reuse", raising(Unsupported("forbidden"))),
    "os error": (layout, "_share_cpu", raising(OSError("no"))),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_memory_that_cannot_be_shown_turns_hotkv_off(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    where, name, instead = TROUBLES[trouble]
    monkeypatch.setattr(where, name, instead, raising=False)
    answer, external = engine().generate("a", PROMPT, 2)
    assert answer and external == 0 and not server.sessions


def test_callback_times_are_logged_at_shutdown(
    engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine()
    one.generate("a", PROMPT, 4)
    with caplog.at_level(logging.INFO, link.logger.name):
        one.shutdown()
    (tmp_path / "log").write_text(caplog.text)
    sides = {side for side, *_ in CALLBACKS.findall(caplog.text)}
    assert sides == {"scheduler", "worker-0"} and hook_share(tmp_path / "log") > 0


def test_stats_add_up_and_reach_prometheus(engine: Any) -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    from hotkv_vllm.connector import HotKVConnector

    one = HotKVStats(data={"loads": 1})
    two = HotKVConnector.build_kv_connector_stats({"loads": 2, "stores": 3})
    assert one.aggregate(two).reduce() == {"loads": 3, "stores": 3}
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    metrics = HotKVConnector.build_prom_metrics(engine().vllm_config, types, ["engine"], {0: ["0"]})
    metrics.observe(one.data)
    assert REGISTRY.get_sample_value("vllm:hotkv_loads_total", {"engine": "0"}) == 3
