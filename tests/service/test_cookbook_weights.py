"""The cookbook downloads checkpoints of this service, by way of exports that it encrypts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tinker
from safetensors.numpy import load_file

from tests.conftest import Service
from tests.matrix.cookbook import installed
from tests.service.test_sdk import datum

pytestmark = pytest.mark.slow
DOWNLOAD = """
import sys
from tinker_cookbook import weights
url, path, folder = sys.argv[1:]
print(weights.download(tinker_path=path, output_dir=folder, base_url=url))
"""


def downloaded(service: Service, path: str, folder: Path) -> dict[str, np.ndarray]:
    subprocess.run(
        [sys.executable, "-c", DOWNLOAD, service.url, path, str(folder)],
        env={**os.environ, "PYTHONPATH": str(installed())},
        check=True,
        timeout=120,
    )
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8
    assert {file.name for file in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    return load_file(folder / "adapter_model.safetensors")


def test_training_weights_and_exports_can_be_downloaded(service: Service, tmp_path: Path):
    with tinker.ServiceClient() as client:
        model = client.create_lora_training_client("tiny", rank=8, seed=3).result()
        model.forward_backward([datum(9, seed=1)], "cross_entropy").result()
        model.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        saved = model.save_state("for-download").result().path
        export = model.save_weights_external("for-tools").result().path
        one = downloaded(service, saved, tmp_path / "one")
        two = downloaded(service, export, tmp_path / "two")
        left = client.create_rest_client().list_user_checkpoints().result().checkpoints
    assert one.keys() == two.keys()
    assert any(array.any() for name, array in one.items() if "lora_B" in name), "it was trained"
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name])
    names = {checkpoint.tinker_path for checkpoint in left}
    assert export in names and not any(name.endswith("/download") for name in names)
