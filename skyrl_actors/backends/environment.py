"""The environment of actors, made in one place."""

from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.groups.environment import BRIEF_SPIN
from skyrl_actors.observe.process import Observed


def actor_environment(config: ClusterConfig) -> dict[str, str]:
    """Must be set before torch and vLLM are imported, so it goes into the actors' runtime environment."""
    observe = config.observe
    common = Observed(config.name, observe.otlp, observe.log_format).environment | {
        "HF_HUB_OFFLINE": "1",  # the controller has resolved every folder already
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_WAIT_POLICY": "passive",  # spinning barriers starve the other processes of a small machine
        "GOMP_SPINCOUNT": BRIEF_SPIN,
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CONFIGURE_LOGGING": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if config.placement.device == "cpu":
        # "auto" binds every engine to the first core.
        common |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "CUDA_VISIBLE_DEVICES": "",
        }
    return common
