"""The config of restarts and deadlines."""

from pydantic import Field

from skyrl_actors.config.frozen import FrozenConfig

LEAST_COLLECTIVE_TIMEOUT_S = 30.0  # ranks connect within this time


class RestartConfig(FrozenConfig):
    """Deadlines of processes, and how those are restarted that died or exceeded one."""

    start_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="longest wait for free devices, or of a new model for memory, and longest "
        "time for a group or an engine to load the base model",
    )
    call_timeout_s: float = Field(
        default=900.0,
        gt=0,
        description="longest time of one operation on a rank, and of one sample or transfer of an "
        "engine without the time in which it was suspended; a collective operation between ranks "
        "may take a third of it",
    )
    max_in_a_row: int = Field(
        default=5,
        ge=0,
        description="consecutive restarts of an actor without a success; after that it is given "
        "up. One operation is tried once less, so that it fails before its actor is given up",
    )

    standby_controller: bool = Field(
        default=False,
        description="a second controller process of a service, which takes over when the first one "
        "dies. On several machines it needs journal.url, and journal.folder and checkpoint_dir on "
        "shared storage; then it also takes over when a machine vanishes",
    )

    @property
    def attempts(self) -> int:
        """How often one operation is tried if its ranks die while it runs."""
        return max(self.max_in_a_row - 1, 1)

    @property
    def collective_timeout_s(self) -> float:
        """Longest time of one collective operation between ranks."""
        return max(self.call_timeout_s / 3, LEAST_COLLECTIVE_TIMEOUT_S)
