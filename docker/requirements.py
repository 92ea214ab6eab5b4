"""Prints what pyproject.toml requires for the given extras, one requirement a line.

In image builds: a layer of dependencies is made anew when they change, and not with every other line of that file.
usage: requirements.py PYPROJECT EXTRA...
"""

import re
import sys
import tomllib
from pathlib import Path


def main(pyproject: str, *extras: str) -> None:
    """Follows references of extras to each other, such as `millrace[log]`."""
    project = tomllib.loads(Path(pyproject).read_text(encoding="utf-8"))["project"]
    found = list(project["dependencies"])
    todo = list(extras)
    while todo:
        for requirement in project["optional-dependencies"][todo.pop()]:
            own = re.fullmatch(rf"{project['name']}\[([\w,-]+)\]", requirement)
            if own:
                todo.extend(own[1].split(","))
            else:
                found.append(requirement)
    print("\n".join(sorted(set(found))))


if __name__ == "__main__":
    main(*sys.argv[1:])
