"""Pages that scripts make are as the scripts make them now; a script refuses what it has no words for."""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import BaseModel

from millrace.config.prime_rl.keys import EVAL_KEYS, RL_KEYS, SFT_KEYS
from millrace.config.prime_rl.meanings import Meaning
from millrace.config.sections.eval import EvalRunConfig
from millrace.config.sections.rl import RLConfig
from millrace.config.sections.sft import SFTConfig
from millrace.config.tree import schema_tree

ROOT = Path(__file__).parents[2]
PAGES = {
    "docs/commands.md": "scripts/commands_reference.py",
    "docs/configuration.md": "scripts/configuration_reference.py",
    "docs/events.md": "scripts/events_reference.py",
    "docs/prime_rl_keys.md": "scripts/prime_rl_reference.py",
}


def made_by(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / script)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_page_is_up_to_date(page: str) -> None:
    done = made_by(PAGES[page])
    assert done.returncode == 0, done.stderr
    assert (ROOT / page).read_text() == done.stdout, f"run: python {PAGES[page]} > {page}"


@pytest.mark.parametrize("model", [RLConfig, SFTConfig, EvalRunConfig])
def test_every_key_of_the_schema_is_on_the_page_of_keys(model: type[BaseModel]) -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    names = {name for key in schema_tree(model).walk() for name in key.path}
    assert len(names) > 40 and not {name for name in names if not re.search(rf"[`.\[]{name}[`.\]]", text)}


@pytest.mark.parametrize("keys", [RL_KEYS, SFT_KEYS, EVAL_KEYS])
def test_every_key_of_prime_rl_that_we_lack_is_on_its_page(keys: Mapping[str, Meaning]) -> None:
    text = (ROOT / "docs/prime_rl_keys.md").read_text()
    known = {node.name for model in (RLConfig, SFTConfig, EvalRunConfig) for node in schema_tree(model).walk()}
    names = {key.rpartition(".")[2].removesuffix("[]") for key in keys} - known
    assert len(names) > 10 and not {name for name in names if not re.search(rf"[`.]{name}`", text)}


def reasons() -> set[str]:
    """Return warnings, and reasons of failed runs, of the page of events, which has all that the code reports."""
    text = (ROOT / "docs/events.md").read_text()
    return set(re.findall(r"^\* `([A-Z][A-Z0-9_]+)`: ", text, re.M))


def test_whatever_a_run_reports_is_found_by_its_symptom() -> None:
    known, text = reasons(), (ROOT / "docs/troubleshooting.md").read_text()
    named = set(re.findall(r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)`", text))
    assert len(known) > 90 and {"REWARD_OUT_OF_RANGE", "TURN_REWARDS_UNEQUAL"} <= known
    assert not known - named, "say in docs/troubleshooting.md what it looks like"


@pytest.mark.computes
@pytest.mark.parametrize("gone", ['"checkpoint_saved": (', '"GROUPS_STALE": (', '"NO_ADVANTAGE": (', '"surplus": ('])
def test_an_event_without_cause_and_remedy_is_refused(gone: str, tmp_path: Path) -> None:
    """The script, with one name of its tables misspelled: what is there is missed, and what is not there found."""
    (tmp_path / "scripts").mkdir()
    for name in ("services", "proto"):
        (tmp_path / name).symlink_to(ROOT / name)
    text = (ROOT / "scripts/events_reference.py").read_text()
    assert gone in text
    (tmp_path / "scripts/page.py").write_text(text.replace(gone, gone.replace('": (', '_X": (')))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "scripts/page.py")], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 1 and "without cause and remedy" in done.stderr
    assert gone.split('"')[1] in done.stderr


@pytest.mark.parametrize("index", ["docs", "docs/decisions"])
def test_an_index_names_every_page_beside_it(index: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+\.md)\)", (ROOT / index / "README.md").read_text())
    named = {(ROOT / index / link).resolve() for link in links}
    pages = {*(ROOT / index).glob("*.md"), *(ROOT / index).glob("guides/*.md")}
    assert {path.name for path in pages - named} == {"README.md"}
