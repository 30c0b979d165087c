"""Compare the checkpoint folder with its mirror, at the start or as soon as the mirror answers.

If the mirror is away at the start, the service starts with the checkpoints that are here. Until the
two were compared, a checkpoint that is not here may be there, so what asks for it waits.
"""

import asyncio
import logging

from skyrl_actors.controller.alignment import Alignment
from skyrl_actors.controller.disk import Disk
from skyrl_actors.messages.errors import ConfigError, Unavailable

log = logging.getLogger(__name__)
REACH_S = 15.0
RETRY_S = 10.0
OTHERS = "other shards have not fetched all their checkpoints yet"
MISTAKES = (FileNotFoundError, PermissionError)  # a bucket that does not exist, a missing right


async def begin(alignment: Alignment, disk: Disk) -> None:
    """Make the two places agree, or note that the mirror is away.

    Raises ConfigError if the mirror refuses to be written, and Unavailable if it is away and this
    machine has no checkpoints: then all may be there.
    """
    away = await _why_away(alignment, disk)
    if away is None:
        await disk.write("whole checkpoints", alignment.all)
        if await disk.write("upkeep", alignment.lacks_others):
            alignment.away = OTHERS
    elif not await disk.read(alignment.has_runs):
        raise Unavailable(f"the checkpoints cannot be fetched: {away}")
    else:
        alignment.away = away
        log.error("the service starts without its mirror of checkpoints: %s", away)


async def follow(alignment: Alignment, disk: Disk) -> None:
    """Make the two places agree once the mirror answers, run by run, while requests are served."""
    while alignment.away:
        await asyncio.sleep(RETRY_S)
        try:
            for run_id, run in await disk.run("upkeep", alignment.differing):
                await disk.change(run_id, "whole checkpoints", alignment.one, run)
            lacks_others = await disk.run("upkeep", alignment.lacks_others)
        except OSError as error:
            alignment.away = str(error)
            log.warning("the mirror of checkpoints is still away: %s", error)
        else:
            alignment.away = OTHERS if lacks_others else None
            log.info("the mirror was compared: %s", alignment.away or "all checkpoints are here")


async def _why_away(alignment: Alignment, disk: Disk) -> str | None:
    try:
        async with asyncio.timeout(REACH_S):
            await disk.run("upkeep", alignment.reach)
    except TimeoutError:
        return f"checkpoint_mirror did not answer within {REACH_S:.0f} s"
    except OSError as error:
        if isinstance(error.__cause__, MISTAKES):
            raise ConfigError(f"checkpoint_mirror cannot be written: {error}") from None
        return str(error)
    return None
