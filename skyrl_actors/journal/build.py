"""The configured journal."""

from skyrl_actors.config.cluster import JournalConfig
from skyrl_actors.journal.base import Journal
from skyrl_actors.journal.journal import SqlJournal


def build_journal(config: JournalConfig) -> Journal:
    return SqlJournal(config)
