"""Environment variables of all actors."""

from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.groups.rank_env import BRIEF_SPIN
from skyrl_actors.observe.process import Observed


def actor_environment(config: ClusterConfig) -> dict[str, str]:
    """Return the runtime environment: torch and vLLM read these variables at import."""
    observe = config.observe
    common = Observed(config.name, observe.otlp, observe.log_format).environment | {
        "HF_HUB_OFFLINE": "1",  # the controller has resolved every folder
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        # Spinning barriers starve the other processes of a small machine.
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": BRIEF_SPIN,
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CONFIGURE_LOGGING": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if config.placement.device == "cpu":
        # The default "auto" binds every engine to the first core.
        common |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "CUDA_VISIBLE_DEVICES": "",
        }
    elif not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & config.environment.keys():
        # torch would round each block of pinned memory up to a power of two, so that the moments
        # of a large model could take twice their size.
        common["PYTORCH_ALLOC_CONF"] = "pinned_max_round_threshold_mb:1"
    return common | config.environment
