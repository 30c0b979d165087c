"""Stored API keys: acts on them, their record, and what a restart finds."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_actors.config.cluster import JournalConfig
from skyrl_actors.config.keys import digest_of, hashed
from skyrl_actors.controller.key_store import KeyStore
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages.errors import InvalidRequest, NotFound
from skyrl_actors.messages.keys import StoredKey
from tests.simulation.journal import Disk, SimJournal

NOW = 1_000.0


class Clock:
    now = NOW


def key(secret: str, name: str = "ann", expires_at: float | None = None) -> StoredKey:
    return StoredKey(
        digest=digest_of(secret),
        name=name,
        role="tenant",
        created_at=Clock.now,
        expires_at=expires_at,
    )


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[SqlJournal]:
    made = SqlJournal(JournalConfig(folder=tmp_path / "journal"), KINDS)
    await made.open("test")
    yield made
    await made.close()


def store_on(journal: SqlJournal | SimJournal) -> KeyStore:
    return KeyStore(journal, [hashed("bob=tml-of-bob-123")], lambda: Clock.now)


@pytest.fixture
def store(journal: SqlJournal) -> KeyStore:
    Clock.now = NOW
    return store_on(journal)


async def test_an_added_key_is_in_the_journal_of_the_next_controller(
    tmp_path: Path, journal: SqlJournal, store: KeyStore
):
    added = await store.add_key(key("one", expires_at=2_000.0), "eve on host")
    assert await store.add_key(key("one"), "eve on host") == added  # a repeat
    await journal.close()
    again = SqlJournal(JournalConfig(folder=tmp_path / "journal"), KINDS)
    found = await again.open("test")
    assert found.keys == (added,)
    (entry,) = await again.audit(10)
    assert (entry.actor, entry.act) == ("eve on host", "add") and added.key_id in entry.subject
    assert "one" not in entry.subject
    await again.close()


async def test_the_table_has_a_new_version_after_each_change(store: KeyStore):
    first = await store.known_keys("")
    assert first is not None and await store.known_keys(first.version) is None
    await store.add_key(key("one"), "eve")
    second = await store.known_keys(first.version)
    assert second is not None and [k.name for k in second.keys] == ["ann"]
    await store.revoke_key("ann", "eve", NOW)
    third = await store.known_keys(second.version)
    assert third is not None and third.keys[0].revoked_at == NOW


async def test_rotation_ends_the_other_keys_of_the_name_after_the_grace(store: KeyStore):
    await store.add_key(key("one"), "eve")
    await store.add_key(key("two", expires_at=NOW + 5), "eve")
    await store.add_key(key("three", name="cid"), "eve")
    ended = await store.rotate_key(key("four"), 60.0, "eve")
    assert {old.digest: old.expires_at for old in ended} == {
        digest_of("one"): NOW + 60,
        digest_of("two"): NOW + 5,
    }
    Clock.now = NOW + 61
    valid = {k.digest for k in await store.list_keys() if k.is_valid(Clock.now)}
    assert valid == {digest_of(s) for s in ("three", "four", "tml-of-bob-123")}
    with pytest.raises(NotFound, match="no valid key has the name 'zoe' and the role tenant"):
        await store.rotate_key(key("five", name="zoe"), 0.0, "eve")


async def test_a_repeat_of_a_revocation_answers_as_the_first(journal: SqlJournal, store: KeyStore):
    """Calls are repeated when the controller dies between the record and the answer."""
    await store.add_key(key("one"), "eve")
    first = await store.revoke_key("ann", "eve", NOW)
    assert await store.revoke_key("ann", "eve", NOW) == first
    assert [entry.act for entry in await journal.audit(10)] == ["add", "revoke"]
    with pytest.raises(NotFound):  # another command
        await store.revoke_key("ann", "eve", NOW + 1)


async def test_no_name_revokes_nothing(journal: SqlJournal):
    nameless = KeyStore(journal, [hashed("tml-nameless-1")], lambda: NOW)
    with pytest.raises(NotFound):
        await nameless.revoke_key("", "eve", NOW)


async def test_a_rotation_does_not_undo_a_revocation_that_is_being_written(store: KeyStore):
    await store.add_key(key("one"), "eve")
    await store.add_key(key("two"), "eve")
    revoked = asyncio.create_task(store.revoke_key(key("one").key_id, "eve", NOW))
    await asyncio.sleep(0)  # the revocation has read the keys, and is written
    ended = await store.rotate_key(key("three"), 3600.0, "eve")
    await revoked
    assert [old.digest for old in ended] == [digest_of("two")]
    valid = {k.digest for k in await store.list_keys() if k.is_valid(NOW)}
    assert digest_of("one") not in valid and digest_of("two") in valid


async def test_a_key_of_the_config_can_be_revoked_and_rotated(store: KeyStore):
    await store.rotate_key(key("new", name="bob"), 0.0, "eve")
    table = await store.known_keys("")
    assert table is not None
    assert {k.digest: k.is_valid(NOW) for k in table.keys} == {
        digest_of("tml-of-bob-123"): False,
        digest_of("new"): True,
    }
    (revoked,) = await store.revoke_key(key("new").key_id, "eve", NOW)
    assert revoked.name == "bob"
    with pytest.raises(NotFound, match="no valid key has the id or name 'bob'; `key list`"):
        await store.revoke_key("bob", "eve", NOW + 1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (key("one", name="a b"), "the name of a key is 'a b'"),
        (key("one", name=""), "the name of a key is ''"),
        (key("one", expires_at=NOW - 1), "would have expired already"),
        (replace(key("one"), role="root"), "the role is 'root'; use tenant, read_only, admin"),  # type: ignore[arg-type]
        (key("tml-of-bob-123"), "the key is in http.api_keys"),
    ],
)
async def test_a_wrong_key_is_refused_and_nothing_is_recorded(
    wrong: StoredKey, said: str, journal: SqlJournal, store: KeyStore
):
    with pytest.raises(InvalidRequest, match=said):
        await store.add_key(wrong, "eve")
    assert await journal.audit(10) == [] and len(await store.list_keys()) == 1


async def test_a_key_that_the_journal_does_not_take_is_not_accepted():
    import random

    disk = Disk(full=True)
    journal = SimJournal(disk, random.Random(0))
    await journal.open("test")
    store = store_on(journal)
    with pytest.raises(Exception, match="no space left"):
        await store.add_key(key("one"), "eve")
    table = await store.known_keys("")
    assert table is not None and table.keys == ()
