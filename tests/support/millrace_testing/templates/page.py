"""Writes docs/chat_templates.md from a comparison.

PYTHONPATH=.venv-templates python -m millrace_testing.templates.page > docs/chat_templates.md
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from millrace_testing.repository import REPOSITORY
from millrace_testing.templates.compare import compare
from millrace_testing.templates.conversations import CONVERSATIONS
from millrace_testing.templates.families import FAMILIES, TRAINED
from millrace_testing.templates.judge import CAUSES, EQUAL

_NUMBERS = {name: number for number, name in enumerate(CONVERSATIONS, start=1)}
_COLUMNS = ("the template refuses", "not written", "rewritten", "melts")
_PEERS = ("TRL", "renderers")

_HEAD = """# Chat templates

<!-- PYTHONPATH=.venv-templates python -m millrace_testing.templates.page > docs/chat_templates.md -->

What `millrace sft` makes of real chat templates, and where its loss mask is another one than that of two peers: TRL
{trl}, by the `{{% generation %}}` markers of its training templates, and renderers {renderers}, by its own programs.
`make test-templates` installs the packages that have the templates
({packages}),
makes this page of {templates} templates and {conversations} conversations, and fails at a difference that has none of
the causes below. Tokenizers are small ones with the special tokens of each family.

What is trained of a turn is what the policy would sample: the tokens behind the prompt that an engine is given, up to
the first one that ends the turn. A row of which a template breaks that is refused with what is lost or rewritten, and
with the argument of the template that helps, if one does; see [Supervised fine-tuning](guides/sft.md).
"""
_FAMILIES = """
## Families

*Ends*: the tokens behind an answer and behind a turn of calls, as found by rendering, and equal to those that the
models' documents name; – where the template, under transformers, writes no calls. *Behind*: what the template writes
behind the end of the last turn, which is not trained. The other columns have the numbers of the conversations that are
refused:

* *raises*: the template does not take the conversation;
* *loses*: it does not write a text, a call or reasoning;
* *rewrites*: earlier turns, or the prompt that an engine was given, stand otherwise in the whole;
* *melts*: the end of a prompt and the beginning of its answer are one token where both are context.

| family | ends | behind | raises | loses | rewrites | melts |
|---|---|---|---|---|---|---|
"""
_TRAINED = """
With TRL's training templates as the models' own, markers say what is trained of rows that such a template rewrites:

| training template of | trained | of these by its markers | refused |
|---|---|---|---|
"""
_DIFFERENCES = """
## Differences from the peers

{rows} rows were compared with {peers}. A row may differ by several causes.

| cause | what it is | TRL | renderers |
|---|---|---|---|
"""


def page(found: Mapping[str, Any]) -> str:
    """The page for a comparison."""
    return "".join(_parts(found["rows"], found["ends"]))


def _parts(rows: list[dict[str, Any]], ends: list[dict[str, Any]]) -> Iterator[str]:
    by_family: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_family[row["family"]].append(row)
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (REPOSITORY / "requirements/templates.txt").read_text(), re.MULTILINE))
    llama = re.findall(r"llama-cpp-python==\S+", (REPOSITORY / "scripts/setup_templates.sh").read_text())
    yield _HEAD.format(
        trl=pins["trl"],
        renderers=pins["renderers"],
        packages=", ".join([*(f"{name} {pin}" for name, pin in pins.items()), llama[0].replace("==", " ")]),
        templates=len(by_family),
        conversations=len(CONVERSATIONS),
    )
    yield "\n" + "; ".join(f"{number} {name}" for name, number in _NUMBERS.items()) + ".\n"
    yield _FAMILIES
    for family, end in zip(FAMILIES, ends, strict=True):
        own = by_family[family.name]
        cells = [_numbers(row for row in own if row["outcome"] == column) for column in _COLUMNS]
        behind = repr(end["behind"]).replace("'", "`") if end["behind"] else "–"
        stops = " ".join(f"`{stop}`" for stop in dict.fromkeys(filter(None, (end["answer"], end["call"]))))
        stops += "" if end["call"] else ", –"
        yield f"| {family.name} | {_escaped(stops)} | {_escaped(behind)} | {' | '.join(cells)} |\n"
    yield _TRAINED
    for name, own in by_family.items():
        if name.startswith(TRAINED):
            counts = Counter(row["outcome"] for row in own)
            marked, trained = counts["marked"], counts["marked"] + counts["trained"]
            yield f"| {name.removeprefix(TRAINED)} | {trained} | {marked} | {len(own) - trained} |\n"
    yield from _differences(rows)


def _differences(rows: list[dict[str, Any]]) -> Iterator[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        counts.update((peer, cause) for peer, causes in row["peers"].items() for cause in causes)
    compared = {peer: sum(peer in row["peers"] for row in rows) for peer in _PEERS}
    peers = " and ".join(f"{peer} ({compared[peer]}, {counts[peer, EQUAL]} of them equal)" for peer in _PEERS)
    yield _DIFFERENCES.format(rows=sum(bool(row["peers"]) for row in rows), peers=peers)
    for cause, words in CAUSES.items():
        numbers = [str(counts[peer, cause]) for peer in _PEERS]
        if any(number != "0" for number in numbers):
            yield f"| {cause} | {words} | {' | '.join(numbers)} |\n"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def _numbers(rows: Iterable[Mapping[str, Any]]) -> str:
    return " ".join(str(_NUMBERS[row["conversation"]]) for row in rows)


if __name__ == "__main__":
    print(page(compare()), end="")
