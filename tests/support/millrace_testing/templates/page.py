"""Writes docs/chat_templates.md, and the report of differences from the peers, from a comparison.

PYTHONPATH=.venv-templates python -m millrace_testing.templates.page
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from millrace_testing.repository import REPOSITORY
from millrace_testing.templates.compare import compare
from millrace_testing.templates.conversations import CONVERSATIONS
from millrace_testing.templates.families import FAMILIES, TRAINED
from millrace_testing.templates.judge import CAUSES, EQUAL

_NUMBERS = {name: number for number, name in enumerate(CONVERSATIONS, start=1)}
_REFUSED = {"the template refuses": "raises", "not written": "loses", "rewritten": "rewrites", "melts": "melts"}
_PEERS = ("TRL", "renderers")

_HEAD = """# Chat templates

<!-- PYTHONPATH=.venv-templates python -m millrace_testing.templates.page -->

What `millrace sft` makes of {templates} real chat templates ({packages}) and {conversations} conversations
(`make test-templates`). Where a template does not let it train what the policy would sample, the row is
[refused](guides/sft.md#what-is-trained-on). [Differences](../benchmarks/results/chat_templates.md) from the loss masks
of TRL and renderers.
"""
_FAMILIES = """
## Families

*Ends*: the tokens after an answer and after a turn of calls (– if the template, under transformers, writes no calls).
*Refused*: the conversations of which the template *raises*, *loses* a text, a call or reasoning, *rewrites* earlier
turns or the prompt of an engine, or *melts* the end of a prompt and the beginning of its answer into one token.

| family | ends | refused |
|---|---|---|
"""
_TRAINED = """
The markers of TRL's training templates say what is trained of {count} more rows: {families}.
"""
_DIFFERENCES = """# Chat templates: differences from the peers

<!-- PYTHONPATH=.venv-templates python -m millrace_testing.templates.page -->

Where the loss mask of `millrace sft` differs from that of TRL {trl}, by the `{{% generation %}}` markers of its
training templates, and of renderers {renderers}, by its own programs. `make test-templates` fails at a difference
without one of these causes.

{rows} rows were compared with {peers}. A row may differ by several causes.

| cause | what it is | TRL | renderers |
|---|---|---|---|
"""


PAGE, REPORT = REPOSITORY / "docs/chat_templates.md", REPOSITORY / "benchmarks/results/chat_templates.md"


def page(found: Mapping[str, Any]) -> str:
    """Return the text of `PAGE` for a comparison."""
    return "".join(_parts(found["rows"], found["ends"]))


def report(found: Mapping[str, Any]) -> str:
    """Return the text of `REPORT` for a comparison: its differences from the peers."""
    return "".join(_differences(found["rows"]))


def _pins() -> dict[str, str]:
    """Return the release of each package that templates are taken from, by name."""
    text = (REPOSITORY / "requirements/templates.txt").read_text()
    return dict(re.findall(r"^([\w-]+)==(\S+)", text, re.MULTILINE))


def _parts(rows: list[dict[str, Any]], ends: list[dict[str, Any]]) -> Iterator[str]:
    by_family: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_family[row["family"]].append(row)
    pins = _pins()
    llama = re.findall(r"llama-cpp-python==\S+", (REPOSITORY / "scripts/setup_templates.sh").read_text())
    yield _HEAD.format(
        packages=", ".join([*(f"{name} {pin}" for name, pin in pins.items()), llama[0].replace("==", " ")]),
        templates=len(by_family),
        conversations=len(CONVERSATIONS),
    )
    yield "\n" + "; ".join(f"{number} {name}" for name, number in _NUMBERS.items()) + ".\n"
    yield _FAMILIES
    alike: dict[str, list[str]] = defaultdict(list)
    for family, end in zip(FAMILIES, ends, strict=True):
        alike[_cells(by_family[family.name], end)].append(family.name)
    yield from (f"| {', '.join(names)} | {cells} |\n" for cells, names in alike.items())
    marked = {
        name.removeprefix(TRAINED): sum(row["outcome"] == "marked" for row in own)
        for name, own in by_family.items()
        if name.startswith(TRAINED)
    }
    families = ", ".join(f"{name} {count}" for name, count in marked.items() if count)
    yield _TRAINED.format(count=sum(marked.values()), families=families)


def _cells(rows: list[dict[str, Any]], end: Mapping[str, Any]) -> str:
    """Return what the table says of a family with these rows and ends, without its name."""
    found = {word: _numbers(row for row in rows if row["outcome"] == outcome) for outcome, word in _REFUSED.items()}
    refused = "; ".join(f"{word} {numbers}" for word, numbers in found.items() if numbers)
    stops = " ".join(f"`{stop}`" for stop in dict.fromkeys(filter(None, (end["answer"], end["call"]))))
    stops += "" if end["call"] else ", –"
    return f"{_escaped(stops)} | {refused}"


def _differences(rows: list[dict[str, Any]]) -> Iterator[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        counts.update((peer, cause) for peer, causes in row["peers"].items() for cause in causes)
    compared = {peer: sum(peer in row["peers"] for row in rows) for peer in _PEERS}
    peers = " and ".join(f"{peer} ({compared[peer]}, {counts[peer, EQUAL]} of them equal)" for peer in _PEERS)
    pins = _pins()
    rows_compared = sum(bool(row["peers"]) for row in rows)
    yield _DIFFERENCES.format(trl=pins["trl"], renderers=pins["renderers"], rows=rows_compared, peers=peers)
    for cause, words in CAUSES.items():
        numbers = [str(counts[peer, cause]) for peer in _PEERS]
        if any(number != "0" for number in numbers):
            yield f"| {cause} | {words} | {' | '.join(numbers)} |\n"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def _numbers(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the numbers of the rows' conversations, neighbours as a range: `1–3,5`."""
    numbers = sorted(_NUMBERS[row["conversation"]] for row in rows)
    runs = [[*run] for _, run in groupby(numbers, key=lambda number: number - numbers.index(number))]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


if __name__ == "__main__":
    comparison = compare()
    PAGE.write_text(page(comparison))
    REPORT.write_text(report(comparison))
