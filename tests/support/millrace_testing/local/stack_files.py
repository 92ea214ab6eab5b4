"""A `stack.json` as a stack of this process writes it."""

import json
import os
from pathlib import Path
from typing import Any

from millrace.processes import table


def write_stack(directory: Path, address: str, **says: Any) -> Path:
    """Write a `stack.json` whose supervisor is this process, unless `says` has another `pid` or `start_ticks`."""
    directory.mkdir(parents=True, exist_ok=True)
    own = {"address": address, "pid": os.getpid(), "start_ticks": table.start_ticks(os.getpid())}
    (directory / "stack.json").write_text(json.dumps({**own, **says}))
    return directory
