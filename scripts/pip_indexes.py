"""Print where pip is configured to install from, as options of uv, one word a line: uv reads no configuration of pip's.

    .venv/bin/python scripts/pip_indexes.py

pip is that of this interpreter. Like pip, uv then takes the best version of all indexes, not that of the first one.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator

SECTIONS = ("global", "install", ":env:")
"""Those that `pip install` reads; a later one overrules."""
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}


def uv_options(listed: str) -> Iterator[str]:
    """The options for what `pip config list` says."""
    found: dict[str, tuple[int, str]] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in SECTIONS:
            rank = SECTIONS.index(section)
            found[key] = max(found.get(key, (rank, "")), (rank, str(ast.literal_eval(value))))
    for key, option in OPTIONS.items():
        for word in found.get(key, (0, ""))[1].split():
            yield from (option, word)
    if found.get("no-index", (0, ""))[1].lower() in ("1", "true", "yes", "on"):
        yield "--no-index"
    if found.keys() & {"extra-index-url", "find-links"}:
        yield from ("--index-strategy", "unsafe-best-match")


if __name__ == "__main__":
    asked = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, text=True, capture_output=True)
    print(*uv_options(asked.stdout), sep="\n")
