"""Rows of a table of statements about commands: what is written, what must happen, and how that is checked."""

import ast
import functools
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millrace_testing.repository import REPOSITORY

FILES = {
    "rl.toml": '[orchestrator]\nbatch_size = 32\nrollouts_per_example = 4\n[[orchestrator.env]]\nid = "a"\n',
    "more.toml": "max_steps = 7\n[trainer.optim]\nlr = 1e-4\n",
    "trainer.toml": "max_steps = 5\n[optim]\nlr = 1e-5\n",
    "orchestrator.toml": 'max_steps = 5\nbatch_size = 32\nrollouts_per_example = 4\n[[env]]\nid = "a"\n',
    "inference.toml": '[model]\nname = "m"\n[parallel]\ntp = 2\n',
    "optim.toml": "lr = 2e-5\n",
    "sft.toml": 'max_steps = 5\n[model]\nname = "m"\n[data]\nname = "rows.jsonl"\n',
    "a.py": "",  # environments that a dry run finds
    "b.py": "",
    "eval.toml": 'num_examples = 3\n[model]\nname = "m"\n[[env]]\nid = "a"\n',
    "two_lengths.toml": 'seq_len = 4096\n[[orchestrator.env]]\nid = "a"\n[orchestrator]\nrollouts_per_example = 2\n',
}
RL, SFT, EVAL = "rl @ rl.toml", "sft @ sft.toml", "eval @ eval.toml"
REPLICA, TRAINER, ORCHESTRATOR = (
    "inference @ inference.toml",
    "trainer @ trainer.toml",
    "orchestrator @ orchestrator.toml",
)
UNBUILT = ("without effect yet", "is not there yet")


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """Exit code and output of one command."""

    code: int
    out: str
    err: str


Check = Callable[[Callable[[str], ParsedCompletion]], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One statement: its verdict of before, its name, what becomes of it now, and how that is checked."""

    before: str
    name: str
    now: str
    check: Check


def effect(before: str, command: str, path: str = "", value: object = None, *, note: str = "") -> Row:
    """Return the row of a command that is accepted, and whose resolved config has `value` at `path`.

    Without `path` the config is not looked at. The dry run warns of nothing unbuilt, and its messages contain `note`.
    """

    def check(run: Callable[[str], ParsedCompletion]) -> None:
        said = run(f"{command} --dry-run")
        assert said.code == 0, said.err
        assert not any(text in said.err for text in UNBUILT), said.err
        assert note in said.err
        if path:
            assert functools.reduce(_into, path.split("."), json.loads(said.out)) == value

    return Row(before, command, "works", check)


def _into(tree: object, part: str) -> object:
    return tree[int(part)] if isinstance(tree, list) else tree[part]  # type: ignore[index]


def later(before: str, command: str, key: str, note: str = "") -> Row:
    """Return the row of a command that is accepted with one warning, which names `key` and contains `note`."""

    def check(run: Callable[[str], ParsedCompletion]) -> None:
        said = run(f"{command} --dry-run")
        assert said.code == 0, said.err
        assert any(text in said.err for text in UNBUILT), "it is there by now: make this row an `effect`"
        assert said.err.count("warning:") == 1 and key.partition(".")[0] in said.err and note in said.err, said.err

    return Row(before, command, "warned of", check)


def refused(before: str, command: str, sentence: str, *, code: int = 2) -> Row:
    """Return the row of a command that exits with `code` and writes `sentence` to its errors."""

    def check(run: Callable[[str], ParsedCompletion]) -> None:
        said = run(command)
        assert said.code == code and sentence in said.err, said.err or said.out

    return Row(before, command, "refused with a sentence", check)


def helps(before: str, command: str, *texts: str) -> Row:
    """Return the row of a command whose `--help` contains all of `texts`."""

    def check(run: Callable[[str], ParsedCompletion]) -> None:
        said = run(f"{command} --help")
        assert said.code == 0 and not [text for text in texts if text not in said.out]

    return Row(before, f"{command} --help", "works", check)


def shown(before: str, name: str, *tests: str, now: str = "works") -> Row:
    """Return the row of a behaviour that `tests` prove, which some lane runs; a path alone is a repository's file."""

    def check(run: Callable[[str], ParsedCompletion]) -> None:
        for test in tests:
            path, _, function = test.partition("::")
            assert (REPOSITORY / path).exists(), path
            assert not function or function in _tests(REPOSITORY / path), test

    return Row(before, name, now, check)


def absent(before: str, name: str, reason: str) -> Row:
    """Return the row of what is not there, for `reason`."""

    def check(run: Callable[[str], ParsedCompletion]) -> None:
        assert reason

    return Row(before, name, "absent", check)


@functools.cache
def _tests(path: Path) -> frozenset[str]:
    """Return the tests of a file that assert something, themselves or in a function of the file, and are not
    skipped.
    """
    functions = {
        node.name: node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    asserting = {
        name for name, node in functions.items() if any(isinstance(each, ast.Assert) for each in ast.walk(node))
    }
    return frozenset(
        name
        for name, node in functions.items()
        if name.startswith("test_")
        and not any("skip" in ast.unparse(decorator) for decorator in node.decorator_list)
        and (name in asserting or asserting & {each.id for each in ast.walk(node) if isinstance(each, ast.Name)})
    )


def key(before: str, name: str, text: str, value: object, path: str = "") -> Row:
    """Return the row of the key `name` of `millrace rl`: `text` sets `value` at `path`, its own path if empty."""
    return effect(before, f"{RL} --{name} {shlex.quote(text)}", path or name.replace("-", "_"), value)
