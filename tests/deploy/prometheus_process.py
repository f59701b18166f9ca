"""Runs a real Prometheus, from Debian's package."""

import contextlib
import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.ports import free_port
from tests.support.programs import program

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "hotkv.rules.yml"


class Prometheus:
    """Scrapes a port of this machine."""

    def __init__(self, folder: Path, port: int, rules: Path = RULES) -> None:
        self.port = free_port()
        settings = {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(rules)],
            "scrape_configs": [
                {"job_name": "hotkv", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(settings))
        command = [
            str(program("prometheus")),
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def ask(self, path: str, **values: str) -> Any:
        """Raises OSError, or AssertionError if the API reports an error."""
        query = urllib.parse.urlencode(values)
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{values}: {error.read().decode()}") from None
        assert body["status"] == "success", body
        assert not body.get("warnings"), body
        return body["data"]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5).close()
            return True
        return False

    def values(self, expr: str) -> list[float]:
        found = self.ask("query", query=expr)
        rows = [found] if found["resultType"] == "scalar" else found["result"]
        return [float(row["value"][1]) for row in rows]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
