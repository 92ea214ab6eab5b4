"""First code in an interpreter of an environment's own; run as a file, `outside.py check` or `outside.py run …`.

It finds no package of ours there, and perhaps another Python than ours: it uses the standard library alone, in words
that old ones understand. `check` prints what is there as JSON. `run ROOT ARGUMENT…` takes `millrace`, and nothing else,
from ROOT, and becomes a worker.
"""

import contextlib
import json
import os
import runpy
import sys
from importlib import util


def check(distributions: "list[str]") -> None:
    """Print, as JSON, this Python's version and the versions of those of the packages `distributions` that are
    installed.
    """
    versions = {}
    with contextlib.suppress(ImportError):  # before Python 3.8, which is too old anyway
        from importlib import metadata

        for name in distributions:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
    sys.stdout.write(json.dumps({"python": list(sys.version_info[:3]), "versions": versions}))


def run(root: str, arguments: "list[str]") -> None:
    """Import `millrace` from `root` alone, and run this process as an env worker with these arguments."""
    place = os.path.join(root, "millrace")
    first = os.path.join(place, "__init__.py")
    # Not by the search path, on which everything else beside the package would come with it.
    spec = util.spec_from_file_location("millrace", first, submodule_search_locations=[place])
    assert spec is not None and spec.loader is not None, "a file of Python"
    sys.modules["millrace"] = module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.argv = [sys.argv[0], *arguments]
    runpy.run_module("millrace.env_server.workers.env_worker", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    del sys.path[0]  # the directory of this file, whose names are nobody else's business
    if sys.argv[1] == "check":
        check(sys.argv[2:])
    else:
        run(sys.argv[2], sys.argv[3:])
