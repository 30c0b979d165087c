"""What people deploy with, against the schemas of those who read it: KubeRay, Kubernetes, Ray Serve, `ray start`, `ray up`, and our own config."""

import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start as ray_start
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from skyrl_actors.commands.serve import refuse_other_config, scaling
from skyrl_actors.config.cluster import ClusterConfig, HttpConfig
from skyrl_actors.config.job import JobConfig
from skyrl_actors.config.load import load
from skyrl_actors.messages.errors import ConfigError
from tests.conftest import ROOT

FIELDS = yaml.safe_load((Path(__file__).parent / "kuberay_fields.yaml").read_text())
KUBERNETES = "1.33"
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
    ray = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if '"ray[' in line).split("==")[1].rstrip('",')
    assert found["spec"][SPEC[found["kind"]]]["rayVersion"] == ray
    for group in groups_of(found):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        assert set(group["rayStartParams"]) <= options
        mounted = {mount["name"] for container in pod["spec"]["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


def test_the_service_that_kuberay_deploys_is_one_that_serves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JOURNAL_URL", "postgresql://user:secret@host/journal")
    given = yaml.safe_load(manifest("rayservice.yaml")["spec"]["serveConfigV2"])
    application = ServeDeploySchema.model_validate(given).applications[0]
    overrides = list(application.args["overrides"])
    keys = next(option for option in overrides if option.startswith("http.api_keys_file="))
    overrides[overrides.index(keys)] = 'http.api_keys=["ann=tml-0123456789abcdef0123"]'  # the file is in the pod
    config = load(ROOT / application.args["config"], overrides)
    assert config.journal.url == "postgresql://user:secret@host/journal" and config.http.max_replicas == 8
    assert AutoscalingConfig.model_validate(scaling(config.http)["autoscaling_config"]).max_replicas == 8
    assert scaling(HttpConfig()) == {"num_replicas": 2}
    with pytest.raises(ValueError, match="max_replicas 1 is below replicas 2"):
        HttpConfig(max_replicas=1)
    monkeypatch.delenv("JOURNAL_URL")
    with pytest.raises(ConfigError, match="JOURNAL_URL"):
        load(ROOT / application.args["config"], overrides)


def test_a_deploy_that_would_be_half_ignored_is_refused():
    running = load(ROOT / "configs/cpu_tiny.yaml")
    refuse_other_config(running, load(ROOT / "configs/cpu_tiny.yaml", ["http.port=9000", "http.api_keys=[tml-0123456789]"]))
    with pytest.raises(
        ConfigError,
        match=r"changes only http: engine.max_num_seqs \(\d+, now 7\); journal.snapshot_operations \(\d+, now 9\)\. End it",
    ):
        refuse_other_config(
            running, load(ROOT / "configs/cpu_tiny.yaml", ["engine.max_num_seqs=7", "journal.snapshot_operations=9"])
        )


def test_the_job_that_kuberay_submits_is_one_that_trains():
    words = shlex.split(manifest("rayjob.yaml")["spec"]["entrypoint"])
    assert words[:4] == ["python", "-m", "skyrl_actors", "train"]
    assert load(ROOT / words[4], words[5:], JobConfig).run.checkpoint_every == 5


def test_serve_configs():
    for file in (ROOT / "configs/serve").iterdir():
        for application in ServeDeploySchema.model_validate(yaml.safe_load(file.read_text())).applications:
            assert isinstance(load(ROOT / application.args["config"], application.args["overrides"]), ClusterConfig), file


def test_the_cluster_launchers_file():
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    validate_config(prepare_config(json.loads(json.dumps(config))))
    types = config["available_node_types"]
    assert {("GPU" in kind["resources"]) for kind in types.values()} == {True, False}
    for command in config["head_start_ray_commands"] + config["worker_start_ray_commands"]:
        words = shlex.split(command.split(";")[-1])
        given = [word.lstrip("-").split("=")[0] for word in words if word.startswith("--")]
        assert set(given) <= {option.lstrip("-") for parameter in ray_start.params for option in parameter.opts}, command
