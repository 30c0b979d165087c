"""Stored images: where each is, and how many requests have it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

import sqlalchemy as sa

from skyrl_actors.journal import tables as t
from skyrl_actors.journal.entries import Accepted, Blob, Entry
from skyrl_actors.journal.images import images_in
from skyrl_actors.journal.packs import PackStore
from skyrl_actors.journal.redo import Statement
from skyrl_actors.messages.errors import Corrupt

COLUMN = t.images.c
MANY = 1000  # digests of one query; databases bound the values of a statement
# A commit that is repeated after a failover, or an image whose pack was removed, has a row already.
ADD = sa.text(
    "INSERT INTO images (digest, pack, start, length, users) "
    "VALUES (:digest, :pack, :start, :length, :users) ON CONFLICT (digest) "
    "DO UPDATE SET pack = excluded.pack, start = excluded.start, length = excluded.length"
)
USE = (
    sa.update(t.images)
    .where(COLUMN.digest == sa.bindparam("of"))
    .values(users=COLUMN.users + sa.bindparam("more"))
)


def places(connection: sa.Connection, digests: Sequence[str]) -> dict[str, Blob]:
    """Return where images are stored, for those that are."""
    found: dict[str, Blob] = {}
    for some in _parts(digests):
        for row in connection.execute(sa.select(t.images).where(COLUMN.digest.in_(some))):
            found[row.digest] = Blob(
                pack=row.pack, offset=row.start, length=row.length, digest=row.digest
            )
    return found


def of_requests(
    engine: sa.Engine, packs: PackStore, entries: Sequence[Entry]
) -> tuple[Counter[str], list[bytes]]:
    """Return how many of the accepted requests have each image, and the images not yet stored.

    A database that went back can name packs that were removed since. Their images are stored again.
    """
    users, contents = Counter[str](), dict[str, bytes]()
    for entry in entries:
        if isinstance(entry, Accepted):
            own = images_in(entry.request)
            users.update(own.keys())
            contents |= own
    if not contents:
        return users, []
    with engine.connect() as connection:
        stored = packs.held(places(connection, list(contents)))
    return users, [content for digest, content in contents.items() if digest not in stored]


def read(engine: sa.Engine, packs: PackStore, digests: Sequence[str]) -> dict[str, bytes]:
    """Read images by their digests. Raises Corrupt if one is missing or changed."""
    with engine.connect() as connection:
        found = places(connection, digests)
    if missing := [digest for digest in digests if digest not in found]:
        raise Corrupt(f"the journal has no image {missing[0]}")
    return {digest: packs.read(place) for digest, place in found.items()}


def use(added: Sequence[Blob], users: Counter[str]) -> list[Statement]:
    """Return the statements for images of new requests. `added` are those not stored before."""
    rows = [
        {
            "digest": blob.digest,
            "pack": blob.pack,
            "start": blob.offset,
            "length": blob.length,
            "users": 0,
        }
        for blob in added
    ]
    return [
        *([(ADD, rows)] if rows else []),
        *([(USE, [{"of": d, "more": n} for d, n in users.items()])] if users else []),
    ]


def release(connection: sa.Connection, texts: Sequence[str | None]) -> list[str]:
    """Count removed requests, whose rows had these texts of digests.

    Images without a request are removed.

    Returns:
        The packs of the removed images, once for each.
    """
    released = Counter(digest for text in texts if text for digest in text.split())
    packs: list[str] = []
    for some in _parts(sorted(released)):
        connection.execute(USE, [{"of": digest, "more": -released[digest]} for digest in some])
        unused = COLUMN.digest.in_(some), COLUMN.users <= 0
        packs += connection.execute(sa.select(COLUMN.pack).where(*unused)).scalars()
        connection.execute(sa.delete(t.images).where(*unused))
    return packs


def _parts(digests: Sequence[str]) -> Iterator[list[str]]:
    left = iter(digests)
    while some := list(islice(left, MANY)):
        yield some
