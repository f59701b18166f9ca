"""Names of an engine and its model that hotkv shows."""

import os
import socket
from types import SimpleNamespace

import pytest

from hotkv_vllm.compat import checks

ID = "4be5a6f2-5a53-4c4e-8d2c-6d1f3f1a8e77"
VARIABLES = ("POD_NAME", "HOSTNAME", "KUBERNETES_SERVICE_HOST")
IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "vllm-0"}
HERE = ""
"""Host and process id, which differ between workers of a test run."""


@pytest.mark.parametrize(
    ("environment", "engine_id", "name"),
    [
        ({}, ID, HERE),
        ({"HOSTNAME": "workstation"}, ID, HERE),
        ({"POD_NAME": " \n"}, ID, HERE),
        (IN_A_POD, ID, "vllm-0"),
        (IN_A_POD | {"HOSTNAME": ""}, ID, socket.gethostname()),
        (IN_A_POD | {"POD_NAME": "vllm-7"}, ID, "vllm-7"),
        ({"POD_NAME": "vllm-7"}, f"{ID}_dp3", "vllm-7/dp3"),
        ({"POD_NAME": "vllm-7"}, "named_dpx", "vllm-7"),
        ({"POD_NAME": "a\x1bb" + 300 * "c"}, ID, "ab" + 198 * "c"),
    ],
)
def test_engine_is_named_by_pod_or_process(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], engine_id: str, name: str
) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    here = f"{socket.gethostname()}:{os.getpid()}"
    assert checks.engine_name(engine_id) == (name or here)


@pytest.mark.parametrize(
    ("served", "names"),
    [(None, ()), ("\n", ()), ("chat", ("chat",)), ("a\tb" + 300 * "c", ("ab" + 198 * "c",))],
)
def test_the_server_accepts_any_name_of_the_model(served: str | None, names: tuple[str]) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(served_model_name=served))
    assert checks.model_names(config) == names
