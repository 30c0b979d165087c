"""Keys of earlier versions, and what replaces them.

A config that contains one is refused. docs/reference/config_changes.md lists all of them.
"""

RENAMED = {
    "transfer.freeze": "transfer.materialize=eager for always, transfer.materialize=lazy for "
    "when_needed",
    "job.policy_lr": "job.learning_rate",
    "job.beta1": "job.betas=[0.9, 0.95] for both decays",
    "job.beta2": "job.betas=[0.9, 0.95] for both decays",
    "job.env.config": "job.env.options",
    "run.trackers.experiment": "run.trackers.project",
    "http.tokens": "http.sdk.pjwt_auth_enabled",
    "placement.timeout_s": "restart.start_timeout_s",
    "engine.start_timeout_s": "restart.start_timeout_s",
    "engine.call_timeout_s": "restart.call_timeout_s",
    "policy.call_timeout_s": "restart.call_timeout_s",
    "limits.num_samples": "limits.samples_in_flight",
    "http.runs": "http.console, whose value is the folder, or null for no console",
    "limits.create_wait_s": "restart.start_timeout_s",
    "job.advantage.whiten": "job.advantage.normalize",
    "job.advantage.by_std": "job.advantage.normalize",
    "policy.strategy.offload_optimizer": "offload=optimizer",
    "policy.strategy.offload_parameters": "offload=all",
    "policy.strategy.cpu_offload": "offload=all",
}
"""What to write instead, by the key without tags of unions and without `cluster.`."""

REMOVED = {
    "transfer.timeout_s": "the ends of a stream wait 120 s for each other",
    "limits.body_memory_bytes": "it is 512 MiB, or limits.body_bytes if that is more",
    "limits.payload_memory_bytes": "it is 1 GiB",
    "limits.result_memory_bytes": "it is 256 MiB",
    "limits.lora_sampler_versions": "the newest 256 are kept; named ones are kept as well",
    "limits.result_ttl_s": "it is 30 s; journal.retention_s says how long answers can be read",
    "limits.session_silent_s": "it is 30 s; SDKs send a heartbeat every 10 s",
    "limits.sessions_per_key": "it is 1000; limits.models_per_key bounds what sessions hold",
    "http.long_poll_s": "polls are held open for 30 s",
    "journal.snapshot_bytes": "it is 256 MiB; set journal.snapshot_operations",
    "journal.keep_snapshots": "3 are kept",
    "journal.sweep_s": "it is 300 s; journal.retention_s sets what is removed",
    "restart.backoff_s": "it is 0.5 s; restart.max_in_a_row limits restarts",
    "restart.max_backoff_s": "it is 30 s; restart.max_in_a_row limits restarts",
    "restart.cooldown_s": "it is 60 s; restart.max_in_a_row limits restarts",
    "job.kl.horizon": "it is 10,000 samples",
    "job.schedule.in_flight": "leave out slice_tokens for finish, set it for update",
    "job.mismatch_warn": "it is 0.05; job.mismatch_stop ends a run",
    "job.overlong.penalty": "it is 1",
    "job.env.min_letters": "it is 3",
    "job.env.max_letters": "it is 5",
    "job.env.long_prompts": "long prompts are counted and skipped",
    "job.long_rows": "long rows are counted and skipped",
    "run.keep_best": "the weights of the best evaluation are kept",
    "run.trackers.entity": "set the environment variable WANDB_ENTITY",
    "engine.max_logprobs": "it is 20",
    "engine.max_scored_cells": "it is 4,000,000",
    "placement.colocated_share": "it is 0.3",
    "placement.memory_reserve": "it is 0.08; set placement.memory_check",
    "base_model.seed": "it is 0",
    "run.trackers.mode": "set the environment variable WANDB_MODE",
    "base_model.cache_dir": "it is ~/.cache/skyrl-actors, or skyrl-actors below $XDG_CACHE_HOME",
    "policy.collective_timeout_s": "it is a third of restart.call_timeout_s",
    "restart.attempts": "it is one less than restart.max_in_a_row",
    "limits.open_requests_per_key": "it is the free part of limits.open_requests",
    "engine.external.model": "it is the first model that the server lists",
    "restart.standbys": "a service on CPUs has one, a job none",
    "limits.datums": "it is 1024; limits.tokens bounds a request",
    "policy.preload": "a service loads the base model at start, a job with its first model",
    "http.haproxy": "HAProxy is always used",
}
"""What applies now, by the same keys."""

SAME_KEYS = {"critic": "policy", "full_strategy": "strategy"}  # sections with the same keys


def advice(path: tuple[str, ...]) -> str | None:
    """Return what to write instead of a key of an earlier version, or None for other keys."""
    named = (SAME_KEYS.get(part, part) for part in (path[1:] if path[0] == "cluster" else path))
    key = ".".join(named)
    if key in RENAMED:
        return f"this key was renamed; use {RENAMED[key]}"
    return f"this key was removed; {REMOVED[key]}" if key in REMOVED else None
