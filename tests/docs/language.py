"""Find words and patterns in prose that the language guide bans.

Prose is the text of Markdown files, and in Python the docstrings, the comments and the strings with
a space. Text between backticks, code blocks and URLs are skipped. Descriptions of config keys and
CLI help are Python strings, so they are included.

`python -m tests.docs.language` prints every hit. `python -m tests.docs.language --tighten` lowers
the numbers in language_ratchet.json to the present ones, and removes files without hits.
"""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RATCHET = Path(__file__).parent / "language_ratchet.json"
OWN_FILES = ("tests/docs/language.py", "tests/docs/test_language.py")
ACTORS = (
    "actor|client|config|controller|engine|file|ingress|journal|process|rank|"
    "sampler|server|service|trainer|worker"
)


@dataclass(frozen=True, kw_only=True)
class Banned:
    """A banned pattern, what to write instead, and a sentence that contains it."""

    pattern: str  # a regular expression; a space matches any white space
    better: str
    example: str
    allowed: tuple[str, ...] = ()  # phrases in which the pattern is allowed

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern.replace(" ", r"\s+"), re.IGNORECASE)

    def hits(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the matches outside of the allowed phrases."""
        kept = [
            m.span()
            for phrase in self.allowed
            for m in re.finditer(re.escape(phrase), text, re.IGNORECASE)
        ]
        for match in self.regex.finditer(text):
            if not any(start <= match.start() and match.end() <= end for start, end in kept):
                yield match


BANNED = (
    Banned(pattern=r"\bcan not\b", better="cannot", example="It can not be done."),
    Banned(
        pattern=r"\banew\b",
        better="again, rebuilt or restarted",
        example="A dead rank is made anew.",
    ),
    Banned(
        pattern=r"\bwho(?:so)?ever\b",
        better="the client, the caller or the process",
        example="Whoever asks is told.",
    ),
    Banned(
        pattern=r"\bwho (?:asks?|gives?|holds?|wants?)\b",
        better="the client, the caller or the process",
        example="Who asks for them gets them.",
    ),
    Banned(
        pattern=r"\b(?:he|him|his)\b",
        better="the owner, the caller or the client",
        example="The caller sees his own runs.",
    ),
    Banned(
        pattern=r"\bwaits? (?:for )?(?:her|his|its|their) turns?\b",
        better="queues",
        example="Another phase waits its turn.",
    ),
    Banned(
        pattern=r"\b(?:take|takes|taking|took) turns\b",
        better="alternate",
        example="Both take turns.",
    ),
    Banned(
        pattern=r"\bwants another\b",
        better="needs another",
        example="A phase that wants another state.",
    ),
    Banned(
        pattern=r"\bhouse\b",
        better="the project or the package",
        example="The rules of the house.",
        allowed=("in-house",),
    ),
    Banned(pattern=r"\brooms\b", better="packages", example="Who may import whom: the rooms."),
    Banned(
        pattern=r"\b(?:homes|at home)\b", better="locations", example="Two homes of a checkpoint."
    ),
    Banned(
        pattern=r"\bneighbou?r(?:s|ing)?\b",
        better="adjacent, other",
        example="Its neighbours are not affected.",
    ),
    Banned(
        pattern=r"\bpromis(?:e|es|ed|ing)\b(?!-)",
        better="accept, guarantee",
        example="What was promised is kept.",
        allowed=("JavaScript promise", "a promise object"),
    ),
    Banned(
        pattern=r"\b(?:its|our|own|the|their) books\b",
        better="records, state, bookkeeping",
        example="A fault in the books.",
    ),
    Banned(
        pattern=r"\b(?:gave|give|given|gives|giving) way\b",
        better="yield, stop",
        example="Engines give way to training.",
    ),
    Banned(
        pattern=rf"\b(?:{ACTORS})s? (?:said|say|says|remember|remembers|remembered)\b",
        better="reports, contains, stores",
        example="The controller says why.",
    ),
    Banned(
        pattern=r"\bremember(?:s|ed|ing)?\b(?! to\b)",
        better="store, keep",
        example="What was remembered is lost.",
    ),
    Banned(
        pattern=r"\b(?:hears? of|heard of|(?:are|is|was|were) heard)\b",
        better="send a heartbeat, reach the service",
        example="SDKs are heard of each 10 s.",
    ),
    Banned(
        pattern=r"\bfalls? silent\b",
        better="stops sending heartbeats",
        example="A session that falls silent.",
    ),
    Banned(
        pattern=r"\b(?:go|goes|going|gone|went) on (?:with|from|behind|where|as|at)\b|\bgone on\b",
        better="continue, resume",
        example="A run is gone on with.",
    ),
    Banned(
        pattern=r"\bheal(?:s|ed|ing)?\b",
        better="recover, repair",
        example="A failed move is healed.",
        allowed=("phase HEALING",),
    ),
    Banned(
        pattern=r"\bfor want of\b",
        better="because … is missing",
        example="It ends for want of memory.",
    ),
    Banned(
        pattern=r"\b(?:has|have) not(?=[.,;:)]|$)",
        better="lacks, is not installed",
        example="A module which this machine has not.",
    ),
    Banned(
        pattern=r"\b(?:is|are) (?:\w+ )?no more\b(?! than\b)",
        better="no longer",
        example="It is watched no more: its end is no loss.",
    ),
    Banned(
        pattern=r"\b(?:owed|owes)\b",
        better="unanswered, due",
        example="Answers that a controller owed.",
    ),
    Banned(
        pattern=r"\b(?:last words|vitals)\b",
        better="log tail, monitoring",
        example="The last words of a process.",
    ),
)
# one search, as most texts have no hit
ANY = re.compile("|".join(banned.regex.pattern for banned in BANNED), re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A banned word in a file."""

    file: str
    line: int
    found: str
    better: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: write {self.better!r} instead of {self.found!r}"


def check(text: str, file: str = "", line: int = 1) -> Iterator[Hit]:
    """Yield the hits in a piece of prose that begins in this line."""
    text = _without_code(text)
    for banned in BANNED if ANY.search(text) else ():
        for match in banned.hits(text):
            found = " ".join(match.group().split())
            yield Hit(
                file=file,
                line=line + text.count("\n", 0, match.start()),
                found=found,
                better=banned.better,
            )


def check_file(path: Path) -> list[Hit]:
    """Return the hits in a Markdown or Python file, in the order of lines."""
    text, name = path.read_text(), str(path.relative_to(ROOT))
    pieces = prose_of_python(text) if path.suffix == ".py" else [(1, _without_blocks(text))]
    return sorted(
        {hit for line, piece in pieces for hit in check(piece, name, line)},
        key=lambda hit: (hit.line, hit.found),
    )


def prose_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings, strings with a space, and comments, each with its first line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    yield from _comments(source)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments.

    Consecutive lines with comments are one text, because a sentence can continue.
    """
    first, last, lines = 0, -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if line != last + 1 and lines:
            yield first, "\n".join(lines)
            lines = []
        first = first if lines else line
        lines.append(token.string.lstrip("# "))
        last = line
    if lines:
        yield first, "\n".join(lines)


def _without_blocks(text: str) -> str:
    """Replace fenced code by as many empty lines."""
    return re.sub(
        r"^(```|~~~).*?^\1", lambda m: "\n" * m.group().count("\n"), text, flags=re.M | re.S
    )


def _without_code(text: str) -> str:
    """Remove code between backticks, and URLs. Lines are kept."""
    text = re.sub(r"`[^`]*`", lambda m: "`" + "\n" * m.group().count("\n") + "`", text)
    return re.sub(r"\w+://[^\s)>]+", "", text)


def tracked(suffix: str) -> list[Path]:
    """Return the tracked files with this suffix, or all files if there is no git checkout."""
    listed = subprocess.run(
        ["git", "ls-files", f"*{suffix}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        names: Iterable[Path] = (ROOT / name for name in listed.stdout.splitlines())
    else:
        names = (path for path in ROOT.rglob(f"*{suffix}") if ".venv" not in path.parts)
    return sorted(
        path for path in names if path.is_file() and str(path.relative_to(ROOT)) not in OWN_FILES
    )


def allowed_hits() -> dict[str, int]:
    """Return the number of hits that each Python file is allowed to have."""
    return json.loads(RATCHET.read_text()) if RATCHET.exists() else {}


def tighten() -> None:
    """Lower the allowed numbers to the present ones. The first call records all files."""
    before = allowed_hits()
    now = {str(path.relative_to(ROOT)): len(check_file(path)) for path in tracked(".py")}
    kept = {file: min(hits, before.get(file, 0)) if before else hits for file, hits in now.items()}
    RATCHET.write_text(
        json.dumps({file: hits for file, hits in kept.items() if hits}, indent=1) + "\n"
    )


if __name__ == "__main__":
    if "--tighten" in sys.argv:
        tighten()
    else:
        for each in (*tracked(".md"), *tracked(".py")):
            for hit in check_file(each):
                print(hit)
