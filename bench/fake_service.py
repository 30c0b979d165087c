"""A service whose backend answers at once. HAProxy, Ray Serve, controller and journal are real.

Measurements on it show the cost of the control plane.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.harness import ROOT
from skyrl_actors.commands import cluster, serve
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.load import load
from skyrl_actors.controller.actor import ControllerActor
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.build import build_journal
from tests.api.local import AnsweringBackend

NAME, PORT = "bench-edge", 8124
SHORT_RETENTION_S = 3600


class AnsweringController(ControllerActor):
    def build_controller(
        self, config: ClusterConfig, base_folders: Mapping[str, Path], detached: bool
    ) -> Controller:
        backend = AnsweringBackend(str(base_folders[config.base_model.name]))
        controller = Controller(config, backend, build_journal(config.journal, KINDS))
        if config.journal.retention_s < SHORT_RETENTION_S:  # a test of memory
            controller.sweep_s, controller.results.ttl_s = 30.0, 5.0
        return controller


@contextmanager
def fake_service(*overrides: str) -> Iterator[ClusterConfig]:
    os.environ |= {
        "TINKER_BASE_URL": f"http://127.0.0.1:{PORT}",
        "TINKER_API_KEY": "tml-bench",
        "TINKER_TELEMETRY": "0",
    }
    cluster.ControllerActor = AnsweringController  # type: ignore[misc]
    with tempfile.TemporaryDirectory(prefix="bench-edge-") as scratch:
        options = (
            f"name={NAME}",
            f"http.port={PORT}",
            f"journal.folder={scratch}/journal",
            f"checkpoint_dir={scratch}/checkpoints",
            "base_model.warmup_steps=0",
            "base_model.name=Qwen/Qwen3-8B",
            "lora.max_adapters=4096",
            "limits.models_per_key=4096",
            *overrides,
        )
        config = ROOT / "configs" / "cpu_tiny.yaml"
        try:
            serve.run(Path(config), options, block=False)
            yield load(config, options)
        finally:
            serve.stop(NAME)
