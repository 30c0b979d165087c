"""What operators set while the service runs: keys, quotas and the mode. The journal keeps it."""

from collections.abc import Callable

from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller.audit_log import AuditLog
from skyrl_actors.controller.key_store import KeyStore
from skyrl_actors.controller.quota_store import QuotaStore
from skyrl_actors.controller.quotas import Quotas
from skyrl_actors.controller.recent import Recent
from skyrl_actors.controller.service_mode import ServiceMode
from skyrl_actors.journal.entries import JournalState
from skyrl_actors.journal.protocol import Journal


class Administration:
    """The settings of one controller that need no restart, and the log of their changes."""

    def __init__(self, config: ClusterConfig, journal: Journal, wall: Callable[[], float]):
        self.keys = KeyStore(journal, config.http.api_keys, wall)
        self.log = AuditLog(journal, wall, self.keys.label)
        self.quotas = Quotas(wall)
        are_divided = config.shards.count > 1 and config.shards.spread == "session"
        self.usage = QuotaStore(journal, self.keys, self.quotas, wall, are_divided)
        self.mode = ServiceMode()
        self.recent = Recent(wall)

    async def begin(self, journal_state: JournalState) -> None:
        """Take what is in the journal."""
        self.keys.begin(journal_state.keys)
        await self.usage.begin(journal_state.quotas)
        self.mode.set(journal_state.mode)
