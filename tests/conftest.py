"""Shared pieces: tiny base models, and one real service for all tests that need one."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TINKER_TELEMETRY", "0")

from pathlib import Path

import pytest

from skyrl_actors.backends.base_models import base_model_folder
from skyrl_actors.config.cluster import TinyBase

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def random_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base model with random weights: for numbers, where skill does not matter."""
    base = TinyBase(warmup_steps=0, cache_dir=tmp_path_factory.mktemp("base"))
    return base_model_folder(base, lambda count: [])
