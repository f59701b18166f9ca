"""Writes docs/connector.md from the classes of the connector's settings: names and defaults are
fields, texts docstrings.

`python -m tools.connector_settings` writes it; `--check` fails if it is out of date. A setting
without text or topic is an error.
"""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from hotkv_sparse import SparseConfig
from hotkv_sparse.vllm.settings import DEFAULTS, SparseSettings
from hotkv_vllm.config import ConnectorConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "connector.md"
HEAD = """# Settings of the connector

Both connectors read vLLM's `kv_connector_extra_config`, as JSON or one by one
([words](words.md)):

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "HotKVConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "hotkv.target": "unix:/srv/hotkv/grpc.sock", "hotkv.load": "always"}}'
    vllm serve MODEL --kv-transfer-config.kv_connector HotKVConnector \\
      --kv-transfer-config.kv_role kv_both \\
      --kv-transfer-config.kv_connector_extra_config.hotkv.target unix:/srv/hotkv/grpc.sock

- By default an engine connects to `unix:/run/hotkv/grpc.sock`, or to the target in the variable
  `HOTKV_TARGET`.
- With a wrong setting the engine does not start, and the message names the allowed values. Without
  a server it does start.
- If `VLLM_PLUGINS` is set, name `hotkv` in it, because vLLM learns the connector's name from
  hotkv's plugin. Or add `"kv_connector_module_path": "hotkv_vllm.connector"`.
- No environment variable switches hotkv on: vLLM lets no plugin set `kv_transfer_config`.
"""
SPARSE = """
## `hotkv.sparse`

For [sparse decode](sparse.md) and [contexts beyond device memory](residency.md). Other defaults
apply by `residency`:

{resident}
"""
TABLE = "\n| setting | default | meaning |\n|---|---|---|\n"
LONG = "Long contexts"
TOPICS = {
    "The server": (
        "target startup_wait_s use_table tenant tls_ca tls_certificate tls_key tls_server_name "
        "token_file"
    ),
    "Hits": "load lookup_timeout_s load_timeout_s",
    "Stores": "max_inflight_store_mib store_timeout_s reset_timeout_s state_interval_tokens",
    "What is shared": "weights_identity allow_untested_vllm",
    LONG: ("sparse sparse_centre residency_timeout_s sketch_tokens allow_sparse_cuda"),
    "Traces and timing": "tracing tracing_sample_ratio device_order",
}
ENTRY = re.compile(r"^(\w+(?:, \w+)*): (.+?)(?=^\S|\Z)", re.DOTALL | re.MULTILINE)
"""Names of fields, and the text in indented lines."""


def texts(owner: type) -> dict[str, str]:
    """Texts of fields, from the class's docstring."""
    found = {}
    for names, text in ENTRY.findall(inspect.getdoc(owner) or ""):
        for name in names.split(", "):
            found[name] = " ".join(text.split()).removesuffix(".")
    return found


def shown(field: Field[Any]) -> str:
    """A default as JSON in backticks; empty for none, None and empty text."""
    made: Any = field.default if field.default_factory is MISSING else field.default_factory()
    return "" if made is MISSING or made is None or made == "" else f"`{json.dumps(made)}`"


def rows(owner: type, names: list[str], prefix: str) -> Iterator[str]:
    """Settings with the same text share a row. Raises KeyError without a text. prefix: such as
    `hotkv.`."""
    by_name = {field.name: field for field in fields(owner)}
    known = texts(owner)
    while names:
        alike = [name for name in names if known[name] == known[names[0]]]
        names = [name for name in names if name not in alike]
        named = ", ".join(f"`{prefix}{name}`" for name in alike)
        defaults = dict.fromkeys(shown(by_name[name]) for name in alike)
        yield f"| {named} | {', '.join(defaults)} | {known[alike[0]]} |\n"


def page() -> str:
    """Raises ValueError if a setting has no topic."""
    placed = [name for names in TOPICS.values() for name in names.split()]
    own = [field.name for field in fields(SparseSettings)]
    settings = [field.name for field in fields(ConnectorConfig) if field.name != "companion"] + own
    if sorted(placed) != sorted(settings):
        raise ValueError(f"TOPICS: {sorted(set(placed) ^ set(settings))} once each, please")
    parts = [HEAD]
    for topic, names in TOPICS.items():
        owner = SparseSettings if topic == LONG else ConnectorConfig
        parts += [f"\n## {topic}\n", TABLE, *rows(owner, names.split(), "hotkv.")]
    own = [field.name for field in fields(SparseConfig)]
    resident = [f'- `"{name}"`: {listed(one)}' for name, one in DEFAULTS.items()]
    parts += [SPARSE.format(resident="\n".join(resident)), TABLE]
    parts += rows(SparseConfig, own, "")
    return "".join(parts)


def listed(settings: Mapping[str, Any]) -> str:
    """Settings and values as part of a sentence."""
    *first, last = (f"`{name}` {json.dumps(value)}" for name, value in settings.items())
    return f"{', '.join(first)} and {last}" if first else last


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/connector.md.")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if the page is out of date"
    )
    made = page()
    if not parser.parse_args().check:
        PAGE.write_text(made)
    elif not PAGE.exists() or PAGE.read_text() != made:
        print("docs/connector.md is out of date: python -m tools.connector_settings")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
