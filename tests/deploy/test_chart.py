"""Tests the Helm chart with three sets of values: Kubernetes schemas accept the objects, the
server the settings; wrong values are refused."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from hotkv_client.command import cli
from hotkv_proto.table import TableGeometry
from hotkv_server import cli as server_cli
from hotkv_server.daemon import STOP_S
from hotkv_server.events.publisher import binds
from hotkv_server.memory.arena import table_file_bytes, table_memory_bytes
from hotkv_server.settings import Settings, load_settings
from hotkv_server.settings.storage import entries_for
from tests.deploy import objects
from tests.deploy.dockerfile import parse
from tests.deploy.objects import VERSIONS, Objects
from tests.deploy.prometheus_process import RULES
from tests.server.certificates import Authority
from tools import chart, dashboard, helm

SPARE_BYTES = 1 << 30
"""The server's least memory besides arena and block table."""
PLACES = {
    "/etc/hotkv-secrets": "secrets",
    "/run/hotkv-admin": "admin",
    "/run/hotkv": "run",
    "/dev/shm/hotkv": "arena",
    "/var/lib/hotkv": "disk",
}
"""A node's folders, and what replaces them here."""
SETS = {"defaults": (), "gpu-tiers": ("gpu-tiers",), "tenants-tls": ("tenants-tls",)}
TENANTS = json.dumps(
    [
        {"name": "search", "certificate_names": ["spiffe://cluster/search"]},
        {"name": "chat", "uids": [1002], "guaranteed_bytes": "4MiB"},
    ]
)
OWN_KINDS = {"ServiceMonitor", "PrometheusRule"}
"""Of the Prometheus operator: Kubernetes has no schema for them."""


@pytest.fixture(params=SETS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rendered(name: str) -> Objects:
    return objects.of_chart(*SETS[name])


def arguments_of(found: Objects, folder: Path) -> list[str]:
    """Writes Secrets and settings as the kubelet would mount them; returns the server's
    arguments."""
    secrets = folder / "secrets"
    secrets.mkdir()
    authority = Authority(secrets, "authority")
    certificate, key = authority.issue("server", "localhost")
    known = {"tls.crt": certificate, "tls.key": key, "ca.crt": authority.path}
    sources = found.volumes.get("secrets", {"projected": {"sources": []}})["projected"]
    for source in sources["sources"]:
        for item in source["secret"]["items"]:
            contents, path = known.get(item["key"]), secrets / item["path"]
            path.write_bytes(contents.read_bytes() if contents else b"secret")
            path.chmod(sources["defaultMode"])
    text, config = found.settings_file, folder / "hotkv.toml"
    for place, own in PLACES.items():
        text = text.replace(f'"{place}', f'"{folder / own}')
    config.write_text(text)
    tcp = ["--tcp-address", "127.0.0.1:0"] if "tcp_address" in text else []
    return ["run", "--config", str(config), *tcp]


SMALL = ("--arena.bytes", "32MiB", "--http.port", "-1")


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_fit_their_schemas(rendered: Objects, version: str) -> None:
    for item in rendered.all:
        if item["kind"] not in OWN_KINDS:
            objects.validate(item, version)


def test_names_and_labels_lead_to_each_other(rendered: Objects) -> None:
    daemons = rendered.one("DaemonSet")
    pods = daemons["spec"]["template"]["metadata"]["labels"].items()
    assert daemons["spec"]["selector"]["matchLabels"].items() <= pods
    assert rendered.one("Service")["spec"]["selector"].items() <= pods
    ports = {item["name"] for item in rendered.server["ports"]}
    assert {item["targetPort"] for item in rendered.one("Service")["spec"]["ports"]} == ports
    volumes = rendered.volumes
    assert volumes["settings"]["configMap"]["name"] == rendered.one("ConfigMap")["metadata"]["name"]
    for container in (rendered.server, rendered.directories):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
    assert {item["metadata"]["namespace"] for item in rendered.all} == {"hotkv"}


def test_prometheus_finds_every_pod_once(rendered: Objects, name: str) -> None:
    annotations = rendered.one("DaemonSet")["spec"]["template"]["metadata"]["annotations"]
    is_monitored = "ServiceMonitor" in rendered.kinds
    assert is_monitored == (name != "defaults")
    assert is_monitored != ("prometheus.io/scrape" in annotations)
    if is_monitored:
        spec, service = rendered.one("ServiceMonitor")["spec"], rendered.one("Service")
        assert spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        (endpoint,) = spec["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


def test_a_budget_counts_pods_by_a_number() -> None:
    """A DaemonSet has no scale subresource, so `maxUnavailable` and percentages don't work."""
    assert "PodDisruptionBudget" not in objects.of_chart().kinds
    found = objects.of_chart("gpu-tiers")
    spec = found.one("PodDisruptionBudget")["spec"]
    assert isinstance(spec["minAvailable"], int) and "maxUnavailable" not in spec
    labels = found.one("DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()


def test_the_server_is_confined(rendered: Objects, name: str) -> None:
    pod = rendered.pod
    assert rendered.server["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    security = pod["securityContext"]
    assert security["runAsNonRoot"] and security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod["automountServiceAccountToken"] and not pod["enableServiceLinks"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for volume in pod["volumes"]:
        assert volume.get("projected", {}).get("defaultMode", 0o440) == 0o440


def test_a_pod_that_ends_has_time_to_drain(rendered: Objects, tmp_path: Path) -> None:
    settings = loaded(rendered, tmp_path)
    grace_s = rendered.pod["terminationGracePeriodSeconds"]
    assert grace_s == math.ceil(settings.drain_timeout_s) + STOP_S


def test_a_pod_has_memory_for_arena_and_index(rendered: Objects, tmp_path: Path) -> None:
    larger = objects.of_chart(sets=("settings.arena.bytes=512GiB",))
    for found in (rendered, larger):
        settings = loaded(found, tmp_path)
        arena, tiers = settings.arena, settings.tiers
        geometry = TableGeometry.for_capacity(arena.capacity, 1, arena.most_bytes)
        table_bytes = table_memory_bytes(geometry, entries_for(arena.bytes))
        needed_bytes = arena.bytes + table_bytes + SPARE_BYTES
        if tiers.disk.path is not None:
            below = TableGeometry.for_capacity(tiers.capacity, 1, tiers.disk.bytes)
            needed_bytes += table_file_bytes(below)
        limits, requests = (found.server["resources"][name] for name in ("limits", "requests"))
        assert limits["memory"] == requests["memory"]
        memory_bytes = objects.num_bytes(limits["memory"])
        assert needed_bytes <= memory_bytes < 1.1 * needed_bytes + (2 << 30)


def loaded(found: Objects, folder: Path) -> Settings:
    config = folder / "settings.toml"
    config.write_text(found.settings_file)
    return load_settings(config, [], "test")


@pytest.mark.parametrize("chosen", SETS)
def test_the_server_accepts_the_settings(
    chosen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags replace what this machine lacks: GPUs and a disk."""
    if chosen == "gpu-tiers":
        pytest.importorskip("obstore", reason="S3 needs Python 3.11")
    found = objects.of_chart(*SETS[chosen])
    flags = [*SMALL, "--copy.cuda", "off", "--tiers.disk.bytes", "16MiB", "--arena.pin", "auto"]
    secret = {"secretKeyRef": {"name": "hotkv-tenants", "key": "tenants.json"}}
    for variable, source in found.environment.items():
        if variable == "HOTKV_EVENTS__NODE":
            assert source == {"fieldRef": {"fieldPath": "spec.nodeName"}}
            monkeypatch.setenv(variable, "node-1")
        elif isinstance(source, dict):
            assert (variable, source) == ("HOTKV_SECURITY__TENANTS", secret)
            monkeypatch.setenv(variable, TENANTS)
    status = server_cli.main([*arguments_of(found, tmp_path), *flags, "--check"])
    printed, said = capsys.readouterr()
    assert (status, said) == (0, "")
    settings: dict[str, Any] = json.loads(printed)
    if chosen == "gpu-tiers":
        tiers = settings["tiers"]
        assert Path(tiers["valkey"]["password_file"]).read_bytes() == b"secret"
        assert settings["client_memory_bytes"] == 128 << 20 and tiers["valkey"]["user"] == "hotkv"
    if chosen == "tenants-tls":
        assert [tenant["name"] for tenant in settings["security"]["tenants"]] == ["search", "chat"]


def test_directories_win_over_the_variables_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, sockets = "/dev/shm/other", "/run/other"
    found = objects.of_chart(sets=(f"directories.arena={arena}", f"directories.sockets={sockets}"))
    image = parse((objects.ROOT / "Dockerfile").read_text())[-1].last("ENV").split()
    for name, value in {**dict(one.split("=", 1) for one in image), **found.environment}.items():
        if name.startswith("HOTKV_"):
            # Kubernetes would fill in a field of the pod.
            monkeypatch.setenv(name, value if isinstance(value, str) else "node-1")
    settings = loaded(found, tmp_path)
    assert (str(settings.arena_dir), str(settings.grpc_socket.parent)) == (arena, sockets)
    paths = {volume["hostPath"]["path"] for volume in found.pod["volumes"] if "hostPath" in volume}
    assert paths == {arena, sockets}


@pytest.mark.parametrize(
    ("sets", "node"), [((), "node-1"), (("settings.events.node=rack-7",), "rack-7")]
)
def test_node_is_named_by_settings_or_kubernetes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...], node: str
) -> None:
    found = objects.of_chart(sets=sets)
    for name, value in found.environment.items():
        if name.startswith("HOTKV_"):
            monkeypatch.setenv(name, value if isinstance(value, str) else "node-1")
    assert loaded(found, tmp_path).events.node == node


def test_new_settings_are_new_pods() -> None:
    def checksum(*sets: str) -> str:
        template = objects.of_chart(sets=sets).one("DaemonSet")["spec"]["template"]
        found: str = template["metadata"]["annotations"]["checksum/settings"]
        return found

    assert checksum() == checksum("podLabels.team=search") != checksum("settings.log_level=debug")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("settings.arena.byts=1GiB", "'byts' not allowed"),
        ("settings.runtime_dir=/x/y", "'runtime_dir' not allowed"),
        ("settings.http.port=70000", "/settings/http/port"),
        ("settings.log_format=xml", "/settings/log_format"),
        ("settings.arena.bytes=64GB", "KiB, MiB, GiB or TiB"),
        ("settings.tiers.valkey.tls=true", "missing property 'address'"),
        ("secrets.files.http.port=x", "/secrets/files"),
        ("secrets.values.security\\.tenants.secret=x", "missing property 'key'"),
        ("podDisruptionBudget.minAvailable=50%", "want integer"),
        ("directories.arena=hotkv", "/directories/arena"),
        ("image.digest=abc", "/image/digest"),
        ("podSecurityContext.runAsUser=0", "/podSecurityContext/runAsUser"),
        ("podSecurityContext.runAsUser=null", "missing property 'runAsUser'"),
        ("podSecurityContext.runAsNonRoot=false", "/podSecurityContext/runAsNonRoot"),
        ("extraEnv[0].value=x", "missing property 'name'"),
        ("extraEnv[0].name=HOTKV_ARENA__BYTES", "HOTKV_ARENA__BYTES .*`settings`"),
        ("extraEnv[0].name=NUMBA_CACHE_DIR", "the chart itself sets NUMBA_CACHE_DIR"),
        ("extraArgs={--arena.bytes=1GiB}", "--arena.bytes=1GiB .*`settings`"),
        ("extraArgs={--tcp-address,:1}", "--tcp-address .*`settings`"),
        ("extraArgs={--events.endpoint,x}", "--events.endpoint .*`settings`"),
        ("extraArgs[0]=7", "/extraArgs/0"),
        ("extraVolumes[0].name=arena", "the chart itself has a volume arena"),
        ("extraVolumeMounts[0].name=arena", "missing property 'mountPath'"),
        (
            "extraVolumeMounts[0].name=of,extraVolumeMounts[0].mountPath=/of",
            "extraVolumes has no of",
        ),
        ("prometheusRule.runbook=trouble.html", "/prometheusRule/runbook"),
        ("dashboard.folder=x", "'folder' not allowed"),
        ("networkPolicy.from.http[0].podSelector=", "'http' not allowed"),
        ("networkPolicy.from=null", "missing property 'from'"),
        ("replicas=3", "'replicas' not allowed"),
    ],
)
def test_wrong_values_are_refused_with_their_name(wrong: str, words: str) -> None:
    objects.of_chart()
    with pytest.raises(helm.HelmError, match=words):
        helm.render(chart.CHART, sets=(wrong,))


@pytest.mark.parametrize("value", ["serviceMonitor", "prometheusRule"])
@pytest.mark.parametrize("setting", ["port=-1", "port=0", "host=127.0.0.1"])
def test_monitoring_without_metrics_is_refused(value: str, setting: str) -> None:
    """Prometheus would find no server, and not report it."""
    objects.of_chart()
    wrong = (f"{value}.enabled=true", f"settings.http.{setting}")
    with pytest.raises(helm.HelmError, match=rf"{value}\.enabled: .*settings\.http\.host"):
        helm.render(chart.CHART, sets=wrong)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("serviceMonitor.enabled=true", r"serviceMonitor\.enabled: .*networkPolicy\.from\.metrics"),
        ("networkPolicy.from.grpc[0].podSelector.matchLabels.a=b", "open no such port"),
    ],
)
def test_a_policy_against_other_values_is_refused(wrong: str, words: str) -> None:
    objects.of_chart()
    with pytest.raises(helm.HelmError, match=words):
        helm.render(chart.CHART, sets=("networkPolicy.enabled=true", wrong))


def rendered_with(folder: Path, release: str = "hotkv", **values: Any) -> Objects:
    objects.of_chart()
    file = folder / "values.yaml"
    file.write_text(json.dumps(values))
    return Objects.read(helm.render(chart.CHART, file, release=release))


def test_settings_of_all_kinds_come_through(tmp_path: Path) -> None:
    tenant = {"name": "one", "uids": [7], "guaranteed_bytes": "4MiB"}
    settings = {
        "integrity": {"scrub_bytes_per_s": 16777216},
        "arena": {"prefault": False},
        "residency": {"share": 0.25},
        "events": {"topic": 'a"b\\c@{model}'},
        "security": {"allowed_uids": [1001, 1002], "tenants": [tenant]},
        "tiers": {"disk": {"write_gb_per_day": None}},
        "http": {"token_file": None},
    }
    resources = {"limits": {"memory": "1Gi"}}
    found = rendered_with(tmp_path, settings=settings, resources=resources)
    assert "scrub_bytes_per_s = 16777216\n" in found.settings_file
    assert "null" not in found.settings_file and found.server["resources"] == resources
    read = loaded(found, tmp_path)
    assert read.residency.share == 0.25 and not read.arena.prefault
    assert read.events.topic == settings["events"]["topic"]
    assert read.security.allowed_uids == [1001, 1002]
    (of_one,) = read.security.tenants
    assert (of_one.name, of_one.uids, of_one.guaranteed_bytes) == ("one", [7], 4 << 20)
    assert read.tiers.disk.write_gb_per_day is None and read.http.token_file is None


def test_zero_is_no_default() -> None:
    found = objects.of_chart(sets=("settings.http.port=0", "settings.drain_timeout_s=0"))
    assert "Service" not in found.kinds and "ports" not in found.server
    assert found.pod["terminationGracePeriodSeconds"] == STOP_S


def test_prometheus_is_not_sent_to_unreachable_ports() -> None:
    found = objects.of_chart(sets=("settings.http.host=127.0.0.1",))
    assert "Service" not in found.kinds and "ports" not in found.server
    annotations = found.one("DaemonSet")["spec"]["template"]["metadata"]["annotations"]
    assert "prometheus.io/scrape" not in annotations
    assert "exec" in found.server["readinessProbe"]


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]", "router"])
def test_bound_endpoints_of_events_are_ports(host: str, tmp_path: Path) -> None:
    events = {"endpoint": f"tcp://{host}:5557", "replay_endpoint": f"tcp://{host}:5558"}
    found = rendered_with(tmp_path, settings={"events": events})
    wanted = {"events": 5557, "replay": 5558} if binds(events["endpoint"]) else {}
    ports = found.one("Service")["spec"]["ports"]
    assert {one["name"]: one["port"] for one in ports} == {"metrics": 9433, **wanted}
    opened = {one["name"]: one["containerPort"] for one in found.server["ports"]}
    assert opened == {"metrics": 9433, **wanted}


def test_a_digest_takes_the_tags_place() -> None:
    digest = f"sha256:{'ab' * 32}"
    found = objects.of_chart(sets=(f"image.digest={digest}", "image.tag=0.1.0-cuda12"))
    containers = (found.server, found.directories, *found.one("Pod")["spec"]["containers"])
    assert {container["image"] for container in containers} == {f"hotkv@{digest}"}


def test_extras_come_beside_the_charts_own(tmp_path: Path) -> None:
    extras: dict[str, list[Any]] = {
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "extraVolumes": [{"name": "own", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "own", "mountPath": "/own"}],
        "extraArgs": ["--log-level", "debug"],
    }
    own, found = objects.of_chart(), rendered_with(tmp_path, **extras)
    for version in VERSIONS:
        objects.validate(found.one("DaemonSet"), version)
    assert found.server["env"] == own.server["env"] + extras["extraEnv"]
    assert found.pod["volumes"] == own.pod["volumes"] + extras["extraVolumes"]
    mounts = found.server["volumeMounts"]
    assert mounts == own.server["volumeMounts"] + extras["extraVolumeMounts"]
    assert found.server["args"] == own.server["args"] + extras["extraArgs"]
    assert found.directories == own.directories


def test_prometheus_rule_has_the_rules_and_runbooks() -> None:
    """Prometheus's own templates, such as `{{ $value }}`, come through."""
    sets = ("prometheusRule.enabled=true", "prometheusRule.labels.release=prometheus")
    address = "https://docs.example/trouble.html"
    plain, addressed = (
        objects.of_chart(sets=(*sets, *more)).one("PrometheusRule")
        for more in ((), (f"prometheusRule.runbook={address}",))
    )
    assert plain["spec"] == objects.yaml.safe_load(RULES.read_text())
    assert plain["metadata"]["labels"]["release"] == "prometheus"
    told, shown = (
        [
            rule["annotations"].pop("runbook_url")
            for group in one["spec"]["groups"]
            for rule in group["rules"]
            if "alert" in rule
        ]
        for one in (plain, addressed)
    )
    assert shown == [one.replace("docs/trouble.md", address) for one in told]
    assert plain["spec"] == addressed["spec"]


def test_dashboard_is_a_config_map_for_grafana(tmp_path: Path) -> None:
    annotations = {"grafana_folder": "hotkv"}
    found = rendered_with(tmp_path, dashboard={"enabled": True, "annotations": annotations})
    (made,) = (one for one in found.all if one["metadata"]["name"] == "hotkv-dashboard")
    for version in VERSIONS:
        objects.validate(made, version)
    assert made["data"] == {"hotkv.json": dashboard.FILE.read_text()}
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert made["metadata"]["annotations"] == annotations
    assert len(json.dumps(made)) < 1 << 20, "Kubernetes refuses larger ones"


def test_a_policy_opens_ports_to_named_peers_only(tmp_path: Path) -> None:
    assert "NetworkPolicy" not in objects.of_chart().kinds
    prometheus = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    }
    egress = [{"ports": [{"protocol": "UDP", "port": 53}]}]
    values = {"enabled": True, "from": {"metrics": [prometheus], "grpc": []}}
    closed = rendered_with(tmp_path, networkPolicy={"enabled": True})
    opened = rendered_with(tmp_path, networkPolicy=values, serviceMonitor={"enabled": True})
    sent = rendered_with(tmp_path, networkPolicy={**values, "egress": egress})
    specs = []
    for found in (closed, opened, sent):
        made = found.one("NetworkPolicy")
        for version in VERSIONS:
            objects.validate(made, version)
        specs.append(made["spec"])
        labels = found.one("DaemonSet")["spec"]["template"]["metadata"]["labels"]
        assert made["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    rule = {"from": [prometheus], "ports": [{"protocol": "TCP", "port": 9433}]}
    assert [one["ingress"] for one in specs] == [[], [rule], [rule]]
    assert [one["policyTypes"] for one in specs] == [
        ["Ingress"],
        ["Ingress"],
        ["Ingress", "Egress"],
    ]
    assert specs[2]["egress"] == egress


def test_the_chart_tests_a_server_as_engines_reach_it(rendered: Objects) -> None:
    """`helm test` runs it beside a server. Nothing takes it for one."""
    test = rendered.one("Pod")
    spec, labels = test["spec"], test["metadata"]["labels"].items()
    (container,) = spec["containers"]
    program, *arguments = container["command"]
    asked = cli.parser().parse_args(arguments)
    (mount,) = container["volumeMounts"]
    (sockets,) = (one for one in rendered.server["volumeMounts"] if one["name"] == "sockets")
    assert (program, asked.command, mount["readOnly"]) == ("hotkv", "ping", True)
    assert asked.target == f"unix:{mount['mountPath']}/grpc.sock"
    (volume,) = spec["volumes"]
    assert volume["hostPath"]["path"] == rendered.volumes["sockets"]["hostPath"]["path"]
    assert mount["mountPath"] == sockets["mountPath"]
    same = ("securityContext", "tolerations", "serviceAccountName", "imagePullSecrets")
    assert all(spec.get(name) == rendered.pod.get(name) for name in same)
    assert container["image"] == rendered.server["image"]
    (near,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    servers = rendered.one("DaemonSet")["spec"]["selector"]["matchLabels"]
    assert near["labelSelector"]["matchLabels"] == servers and not servers.items() <= labels
    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"


def test_the_server_may_be_another_user() -> None:
    """Such as OpenShift's, from the range of the namespace."""
    sets = ("runAsUser=1000680000", "runAsGroup=0", "fsGroup=0", "seLinuxOptions.type=spc_t")
    found = objects.of_chart(sets=tuple(f"podSecurityContext.{one}" for one in sets))
    security = found.pod["securityContext"]
    assert security["runAsUser"] == 1000680000 and security["runAsNonRoot"]
    assert security["seLinuxOptions"] == {"type": "spc_t"}
    script = found.directories["command"][-1]
    owners = re.findall(r"^chown (?:-R )?(\S+) (.*)$", script, re.M)
    assert {owner for owner, _ in owners} == {"1000680000:0"}
    assert re.search("^chown -R .* /kernels$", script, re.M), "numba writes beside its files"


def test_the_default_fits_small_nodes(tmp_path: Path) -> None:
    found = objects.of_chart()
    assert loaded(found, tmp_path).arena.bytes == 8 << 30
    assert objects.num_bytes(found.server["resources"]["requests"]["memory"]) < 11 << 30


def test_names_that_look_like_numbers_are_names(tmp_path: Path) -> None:
    secret = {"secret": "1e3", "key": "0x1"}
    found = rendered_with(
        tmp_path,
        "2026",
        priorityClassName="123",
        serviceAccount={"name": "1e4", "create": True},
        gpu={"enabled": True, "runtimeClassName": "12"},
        secrets={"files": {"security.tls.key": secret}, "values": {"security.audit": secret}},
    )
    for item in found.all:
        objects.validate(item, VERSIONS[-1])
    assert found.pod["priorityClassName"] == "123" and found.pod["runtimeClassName"] == "12"
    account = found.one("ServiceAccount")["metadata"]["name"]
    assert found.pod["serviceAccountName"] == account == "1e4"
    named = found.environment["HOTKV_SECURITY__AUDIT"]
    assert named == {"secretKeyRef": {"name": "1e3", "key": "0x1"}}


def test_gpu_manifest_is_the_base_with_patch() -> None:
    patch = objects.of_manifest("gpu.yaml").one("DaemonSet")
    patched = objects.merged(objects.of_chart().one("DaemonSet"), patch)
    assert objects.of_chart(sets=("gpu.enabled=true",)).one("DaemonSet") == patched


@pytest.mark.parametrize("shares_pids", [True, False])
def test_notes_name_hostpid_if_the_pod_has_it(shares_pids: bool) -> None:
    text = helm.render(
        chart.CHART,
        sets=("gpu.enabled=true", f"gpu.hostPID={json.dumps(shares_pids)}"),
        command=("install", "--dry-run=client"),
    ).partition("NOTES:")[2]
    assert ("hostPID" in text) is shares_pids


@pytest.mark.parametrize("is_for_gpus", ["false", "true"])
def test_notes_name_the_pods_working_connector(is_for_gpus: str) -> None:
    objects.of_chart()
    text = helm.render(
        chart.CHART,
        sets=(f"gpu.enabled={is_for_gpus}",),
        command=("install", "--dry-run=client"),
    ).partition("NOTES:")[2]
    told = [json.loads(one) for one in re.findall(r"--kv-transfer-config '(.*?)'", text, re.S)]
    connectors = ["HotKVOffloadingConnector"] * (is_for_gpus == "false") + ["HotKVConnector"]
    assert [one["kv_connector"] for one in told] == connectors
    for one in told:
        extra = one["kv_connector_extra_config"]
        assert extra["hotkv.target"] == "unix:/run/hotkv/grpc.sock"


def test_schema_and_plain_manifest_are_up_to_date() -> None:
    """`python -m tools.chart` writes them."""
    objects.of_chart()
    assert chart.schema_text() == chart.SCHEMA.read_text()
    assert chart.manifest() == chart.MANIFEST.read_text()
