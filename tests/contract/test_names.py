"""One name for one thing, in classes and in docs/vocabulary.md; the files that pages for contributors name exist."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import millrace
from millrace_testing import syntax

ROOT = Path(__file__).resolve().parents[2]
SERVICES = Path(millrace.__file__).parent


def _classes() -> dict[str, list[str]]:
    """Return where the public classes of the services are defined, by name; a private one stays in its module."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in SERVICES.rglob("*.py"):
        if "_pb2" not in path.name:
            names = [node.name for node in syntax.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
            for name in (name for name in names if not name.startswith("_")):
                found[name].append(str(path.relative_to(SERVICES)))
    return found


def test_a_class_name_stands_for_one_class() -> None:
    assert not {name: places for name, places in _classes().items() if len(places) > 1}


def _terms(table: str) -> list[str]:
    """Return the words that the left column explains."""
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")][1:]
    return [term.strip(" `") for cell in cells for term in re.split(r"[,/](?![^()]*\))", cell)]


def test_a_word_of_the_vocabulary_has_one_entry() -> None:
    terms = _terms((ROOT / "docs" / "vocabulary.md").read_text())
    assert len(terms) > 30
    assert not sorted({term for term in terms if terms.count(term) > 1})


RETIRED = re.compile(
    r"\b(wish(es|ed)?|heed(s|ed)?|bur(y|ies|ied)|doom(s|ed)?|recall(s|ed)?|know_base|told_to|whoever)\b"
    r"|beside the serving|\bdef _?let_go\b",
    re.IGNORECASE,
)
"""Words of a former private dialect: write intent, apply, reap, abort, fetch, background verification. (`let_go` is the
name of a field of worker_service.proto, which stays.)"""


def test_retired_words_stay_retired() -> None:
    files = [path for path in SERVICES.rglob("*.py") if "_pb2" not in path.name]
    files += (ROOT / "docs").rglob("*.md")
    assert not [
        f"{path.relative_to(ROOT)}: {found[0]}" for path in files for found in RETIRED.finditer(path.read_text())
    ]


@pytest.mark.parametrize("text", ["Whoever asks", "it was doomed", "def let_go(self)", "self.told_to(x)"])
def test_a_retired_word_is_seen(text: str) -> None:
    assert RETIRED.search(text)


def _files_named(text: str) -> Iterator[str]:
    """Yield what is between backticks and looks like a file or folder of this repository."""
    for words in re.findall(r"`([^`\n]+)`", text):
        for word in words.split():
            if re.fullmatch(r"[\w./-]+(/|\.py|\.md|\.toml|\.proto|\.sh)", word):
                yield word


def test_the_files_that_the_pages_for_contributors_name_exist() -> None:
    text = "\n".join((ROOT / page).read_text() for page in ("AGENTS.md", "CONTRIBUTING.md"))
    names = sorted(set(_files_named(text)))
    assert len(names) > 40
    paths = [path.relative_to(ROOT).as_posix() for top in ("services", "tests") for path in (ROOT / top).rglob("*.py")]
    at_home = [ROOT, SERVICES]  # rooms are called by their name within the package

    def exists(name: str) -> bool:
        return any((home / name).exists() for home in at_home) or any(path.endswith(f"/{name}") for path in paths)

    # `utils.py` is the name that no file has.
    assert [name for name in names if not exists(name)] == ["utils.py"]


def test_the_files_that_comments_name_exist() -> None:
    paths = [path.relative_to(ROOT).as_posix() for top in ("services", "tests") for path in (ROOT / top).rglob("*.py")]
    others = {"endpoints.py", "pkg/module.py"}  # a file of the user's, and one of an example
    wrong = [
        f"{path.relative_to(SERVICES)}: {name}"
        for path in SERVICES.rglob("*.py")
        for name in re.findall(r"`([\w/]+\.py)\b", path.read_text())
        if name not in others and not any(known.endswith(f"/{name}") for known in paths)
    ]
    assert not wrong
