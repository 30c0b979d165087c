"""Prose is plain English: the docs have no banned words, and their number in the code falls."""

import pytest

from tests.docs import language
from tests.docs.language import (
    BANNED,
    RATCHET,
    ROOT,
    Banned,
    check,
    check_file,
    prose_of_python,
    tracked,
)


@pytest.mark.parametrize("banned", BANNED, ids=lambda banned: banned.example)
def test_each_pattern_is_found_in_its_example(banned: Banned):
    assert [hit for hit in check(banned.example) if hit.better == banned.better], banned.example
    assert not list(banned.hits(" ".join(banned.allowed)))
    assert not list(banned.hits(banned.better)), "the better word is banned itself"


@pytest.mark.parametrize(
    "text",
    [
        "A handbook of Facebook's promise-free code in a warehouse.",
        "It cannot be sampled, and it goes on.",
        "An episode has 3 turns; the engine took 2 s. No more than 4 are allowed. "
        "It is no more than 4.",
        "Read `colocation/healing.py` and https://example.com/his/house first.",
    ],
)
def test_common_technical_words_are_not_found(text: str):
    assert not list(check(text))


def test_hits_are_reported_with_file_line_and_better_word():
    (hit,) = check("A first line.\nThis can\nnot be.", "docs/a.md", 10)
    assert str(hit) == "docs/a.md:11: write 'cannot' instead of 'can not'"


def test_prose_of_python_is_docstrings_comments_and_strings_with_a_space():
    source = (
        '"""Doc string."""\n# a comment that\n# continues\nx = f"a {1} text"\ny = "key"  # behind\n'
    )
    assert sorted(prose_of_python(source)) == [
        (1, "Doc string."),
        (2, "a comment that\ncontinues"),
        (4, " text"),
        (4, "a "),
        (5, "behind"),
    ]


def test_markdown_has_no_banned_words():
    hits = [str(hit) for path in tracked(".md") for hit in check_file(path)]
    assert not hits, "\n".join(hits)


def test_banned_words_in_the_code_only_become_fewer():
    allowed = language.allowed_hits()
    assert allowed == {} or min(allowed.values()) > 0, f"{RATCHET.name}: remove files without hits"
    faults: list[str] = []
    for path in tracked(".py"):
        hits, file = check_file(path), str(path.relative_to(ROOT))
        if len(hits) > allowed.get(file, 0):
            faults += [
                f"{file}: {len(hits)} banned words, {allowed.get(file, 0)} allowed",
                *map(str, hits),
            ]
    assert not faults, "\n".join(
        [*faults, f"Rewrite the sentences; if a file was renamed, rename it in {RATCHET.name} too."]
    )
