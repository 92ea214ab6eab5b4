"""Print where pip is configured to install from, as variables of uv, one a line: uv reads no configuration of pip's.

    .venv/bin/python scripts/pip_indexes.py

pip is that of this interpreter. Like pip, uv then takes the best version of all indexes, not that of the first one.
They are variables, not options, because the URL of an index may have a password in it. uv has none for `--no-index`:
that is MILLRACE_NO_INDEX.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator

SECTIONS = ("global", "install", ":env:")
"""Those that `pip install` reads; a later one overrules."""
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
"""uv's variable, and what is between the values of one that takes several."""


def uv_variables(listed: str) -> Iterator[str]:
    """Assignments for what `pip config list` says."""
    found: dict[str, tuple[int, str]] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in SECTIONS:
            rank = SECTIONS.index(section)
            found[key] = max(found.get(key, (rank, "")), (rank, str(ast.literal_eval(value))))
    for key, (variable, between) in VARIABLES.items():
        if words := found.get(key, (0, ""))[1].split():
            yield f"{variable}={between.join(words)}"
    if found.get("no-index", (0, ""))[1].lower() in ("1", "true", "yes", "on"):
        yield "MILLRACE_NO_INDEX=1"
    if found.keys() & {"extra-index-url", "find-links"}:
        yield "UV_INDEX_STRATEGY=unsafe-best-match"


if __name__ == "__main__":
    asked = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, text=True, capture_output=True)
    print(*uv_variables(asked.stdout), sep="\n")
