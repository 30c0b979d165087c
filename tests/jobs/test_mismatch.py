"""Engine and trainer that differ: said, or the end of the run."""

from typing import Any, cast

import pytest

from skyrl_actors.config.job import PpoConfig
from skyrl_actors.jobs.ppo import PpoJob
from skyrl_actors.messages.errors import InternalError


class Told:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warned(self, text: str) -> None:
        self.warnings.append(text)


def test_a_mismatch_is_said_or_ends_the_run():
    told = Told()
    run = PpoJob(cast(Any, None), PpoConfig(mismatch_warn=0.01, mismatch_stop=0.1), cast(Any, told), 32.0)
    run._check_mismatch(1, 0.005)
    assert not told.warnings
    run._check_mismatch(2, 0.02)
    assert told.warnings == ["iteration 2: engine and trainer differ by 0.02 nats a token (job.mismatch_warn 0.01)"]
    with pytest.raises(InternalError, match=r"iteration 3: .* by 0\.2 nats a token, more than job\.mismatch_stop 0\.1"):
        run._check_mismatch(3, 0.2)
