"""Tests how many blocks `HotKVOffloadingConnector` puts into a chunk by default."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from hotkv_vllm.offloading import connector
from hotkv_vllm.offloading.connector import choose_chunks


def chosen(
    patch: pytest.MonkeyPatch,
    sizes: tuple[int, ...],
    interval: int | None = None,
    events: bool = False,
    **extra: Any,
) -> dict[str, Any]:
    """Returns the settings of vLLM's offloading.

    sizes: by KV cache group, tokens per block; 0 for recurrent states.
    """
    patch.setattr(connector, "group_block_tokens", lambda *_: sizes)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_cache_retention_interval=interval),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
    )
    choose_chunks(extra, config, None)
    return extra


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [((16,), 4), ((32,), 2), ((64,), 1), ((128,), 1), ((48,), 1), ((16, 32), 2), ((16, 0), 1)],
)
def test_chunk_has_64_tokens_or_one_block(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], blocks: int
) -> None:
    assert chosen(monkeypatch, sizes) == {"blocks_per_chunk": blocks}


@pytest.mark.parametrize(("interval", "blocks"), [(32, 1), (64, 4), (0, 4)])
def test_chunks_divide_the_retention_interval(
    monkeypatch: pytest.MonkeyPatch, interval: int, blocks: int
) -> None:
    assert chosen(monkeypatch, (16,), interval) == {"blocks_per_chunk": blocks}


@pytest.mark.parametrize("extra", [{"blocks_per_chunk": 3}, {"block_size": 48}], ids=str)
def test_users_chunks_are_kept(monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]) -> None:
    assert chosen(monkeypatch, (16,), **extra) == extra


@pytest.mark.parametrize("block_tokens", [16, 64])
def test_events_change_no_chunks_but_warn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, block_tokens: int
) -> None:
    monkeypatch.setattr(connector.logger, "propagate", True)
    with caplog.at_level(logging.WARNING, connector.logger.name):
        found = chosen(monkeypatch, (block_tokens,), events=True)
    assert found == chosen(monkeypatch, (block_tokens,))
    assert ("blocks_per_chunk = 1" in caplog.text) is (block_tokens < 64)
