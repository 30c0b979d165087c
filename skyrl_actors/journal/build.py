"""Build the configured journal."""

from skyrl_actors.config.cluster import JournalConfig
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.journal.kinds import Kinds
from skyrl_actors.journal.protocol import Journal


def build_journal(config: JournalConfig, kinds: Kinds) -> Journal:
    """Return the journal, which is not open yet."""
    return SqlJournal(config, kinds)
