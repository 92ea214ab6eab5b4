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

Which S3 servers carry runs. `make test-stores` tries those of package registries (`requirements/stores.txt`),
trains three steps on each, and audits every byte; here on {date}, at a load average of up to {load:.0f}. Every
orchestrator, `millrace rl`, `millrace up` and `millrace doctor` try any other server themselves.

| server | from | version | verdict, or what failed | one PUT | self-test | the run |
|---|---|---|---|---|---|---|
"""
_NEEDED = tuple(name for name in TRIALS if name != "compare-and-swap")
_TRIED = """
*One PUT* is a conditional PUT while nobody else writes, the median of nine. In the *self-test*, once per store, 16
writers race for seven objects, and parts, listings and a late writer are tried. Late answers (SeaweedFS lets losers of
a race sleep for seconds) end the orchestrator if a loser has won, too. `STORE_SEMANTICS` says what a server answered.
"""


def render(found: dict[str, dict[str, Any]]) -> str:
    """Return the page, from the results of the lane by server."""
    rows = [found[name] for name in (*SERVERS, CEPH) if name in found]
    text = _HEAD.format(date=max(row["date"] for row in rows), load=max(row["load"] for row in rows))
    for row in rows:
        failed = ", ".join(name for name in _NEEDED if row["tried"][name])
        verdict = (failed or "refused") if row["reason"] else "**accepted**"
        text += _line(row["title"], row["from"], row["version"], verdict, *_times(row), row["run"])
    return text + _TRIED


def _times(row: dict[str, Any]) -> list[str]:
    return [f"{1000 * row['put_s']:.0f} ms", f"{row['self_test_s']:.2f} s"]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |\n"


def main(directory: Path) -> None:
    """Print the page."""
    sys.stdout.write(render({path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
