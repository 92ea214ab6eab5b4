"""Where the process logs of a run lie, if its stack runs (or ran) in this directory."""

import json
from pathlib import Path


def process_logs(address: str, run_name: str, *, component: str | None = None, root: Path | None = None) -> list[Path]:
    """Log files of the stack that listens on `address`, and of the run's own stack; only `component`'s if given."""
    base = root or Path("outputs")
    directories = [base / run_name.removeprefix("runs/") / "logs"]
    for path in sorted(base.glob("*/stack.json")):
        try:
            stack = json.loads(path.read_text())
        except (OSError, ValueError):  # being written, or gone meanwhile
            continue
        if stack.get("address") == address:
            directories.append(Path(stack["logs"]))
    files = {path.resolve() for directory in directories for path in directory.glob("*.log")}
    return sorted(path for path in files if component is None or path.stem.startswith(component))
