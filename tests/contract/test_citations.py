"""What comments and documents name is there: documents and source files of this repository."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_CITING = ("services/millrace/**/*.py", "tests/**/*.py", "proto/**/*.proto", "benchmarks/**/*.py")
_CITING += (
    "environments/**/*.py",
    "scripts/*",
    "charts/**/*.yaml",
    "charts/**/*.tpl",
    "docker/*.sh",
    "Dockerfile*",
    "docker*.yml",
)
_CITING += ("Makefile",)
SOURCES = sorted(path for pattern in _CITING for path in ROOT.glob(pattern) if path.is_file())
HISTORY = ROOT / "CHANGELOG.md"

_DOCUMENT = re.compile(r"(?<![\w/.-])((?:docs|benchmarks)/[\w/-]+\.md)\b")
_PRIVATE = re.compile(r"\b[A-Z][A-Z_]{4,}(?:\.md)? §\s?\d")
_LINK = re.compile(r"\]\(([^)\s:#]*)(#[\w-]+)?\)")
_SOURCE = re.compile(r"`((?:services/millrace/|tests/|scripts/|benchmarks/)?[\w/]+/\w+\.(?:py|sh|proto))`")
_PLACES = ("", "services/", "services/millrace/", "proto/millrace/")


def test_documents_that_comments_name_are_there() -> None:
    missing = {
        (str(path.relative_to(ROOT)), cited)
        for path in SOURCES
        for cited in _DOCUMENT.findall(path.read_text())
        if not (ROOT / cited).exists()
    }
    assert not missing


def test_comments_cite_no_section_of_a_document_that_is_elsewhere() -> None:
    assert not {str(path.relative_to(ROOT)): found for path in SOURCES if (found := _PRIVATE.findall(path.read_text()))}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_file_that_a_document_names_is_there(path: Path) -> None:
    if path == HISTORY:
        pytest.skip("it tells of files that have gone since")
    text = path.read_text()
    cited = set(_SOURCE.findall(text)) | set(_DOCUMENT.findall(text))
    missing = sorted(each for each in cited if not any((ROOT / place / each).exists() for place in _PLACES))
    assert not missing, f"{path.name} names files that are not there: {missing}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_link_leads_to_a_file_and_to_a_heading_of_it(path: Path) -> None:
    dead = []
    for target, anchor in _LINK.findall(path.read_text()):
        page = path.parent / target if target else path
        if not page.exists() or (anchor and anchor[1:] not in _headings(page)):
            dead.append(target + anchor)
    assert not dead


def _headings(page: Path) -> set[str]:
    """Return the names under which headings can be linked."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}
