"""The stacks that run on this machine, as the `stack.json` in the directory of each says.

A file is believed as long as the supervisor that wrote it lives: its process id and its start time are compared,
because another process may get the id later.
"""

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.cli.errors import CliError
from millrace.cli.options import DEFAULT_LISTEN
from millrace.custom_code import environment_module
from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError

if TYPE_CHECKING:
    from millrace.config import RLConfig

OUTPUTS = Path("outputs")
"""Below it the stacks that were started in this directory work, unless `output_dir` or `--dir` says otherwise."""
_PATTERNS = ("*/stack.json", "*/*/stack.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStack:
    """A stack whose supervisor lives."""

    directory: Path
    address: str
    """host:port of its orchestrator."""
    says: Mapping[str, Any]
    """The whole of its `stack.json`."""

    @property
    def is_shared(self) -> bool:
        """Whether it stays for the runs of all (`millrace up`); else it ends with the run that it was started for."""
        return self.says.get("is_durable") is True

    def text(self, name: str) -> str | None:
        """Return what it says under this name, if that is a text."""
        found = self.says.get(name)
        return found if isinstance(found, str) else None


def read_stack(directory: Path) -> RunningStack | None:
    """The stack of a directory; None if none runs there: no file, a damaged one, or one whose supervisor is gone."""
    path = directory / "stack.json"
    try:
        says = decode_object(path.read_bytes(), what=str(path), reason="STACK_FILE_CORRUPT")
    except (CorruptObjectError, OSError):  # none, or being written
        return None
    address, pid, ticks = says.get("address"), says.get("pid"), says.get("start_ticks")
    if not (isinstance(address, str) and isinstance(pid, int) and isinstance(ticks, int)):
        return None
    return RunningStack(directory=directory, address=address, says=says) if _is_alive(pid, ticks) else None


def running_stacks(root: Path = OUTPUTS) -> list[RunningStack]:
    """Return the stacks that work below `root`, by directory."""
    paths = sorted({path for pattern in _PATTERNS for path in root.glob(pattern)})
    return [stack for path in paths if (stack := read_stack(path.parent)) is not None]


def choose_stack(run: str = "", *, root: Path = OUTPUTS, option: str = "--server") -> RunningStack | None:
    """Return the stack that a command means that names none; None if none runs here.

    The only one, or that of the run (`millrace rl` calls a stack's directory as its run), or the only one that several
    runs share. CliError with the list of them where it may be one or another; `option` is what names one.
    """
    found = running_stacks(root)
    wanted = run.removeprefix("runs/")
    named = [stack for stack in found if wanted and stack.directory.name == wanted]
    named = named or [stack for stack in found if wanted and stack.directory.name.startswith(wanted)]
    shared = [stack for stack in found if stack.is_shared] if wanted not in ("", "-") else []
    for meant in (named, found, shared):
        if len(meant) == 1:
            return meant[0]
    if not found:
        return None
    lines = "\n".join(f"  - {stack.address:<21} {_describe(stack)}" for stack in found)
    first = found[0]
    hint = (
        f"--dir {first.directory}" if option == "--dir" else f"--server {first.address}, or set MILLRACE_SERVER to it"
    )
    raise CliError(
        f"{len(found)} stacks run here, and it is not said which is meant:\n{lines}", hint=f"name one, such as {hint}"
    )


def shared_address(root: Path = OUTPUTS) -> str:
    """Where a run is submitted that names no server: the only shared stack here, or where `millrace up` listens."""
    shared = [stack for stack in running_stacks(root) if stack.is_shared]
    return shared[0].address if len(shared) == 1 else DEFAULT_LISTEN


def say_environments_beside(config: "RLConfig", stack: RunningStack | None, *, server: str) -> None:
    """Note the environments whose file is here and nowhere else that this stack is known to look in."""
    evaluation = config.orchestrator.eval
    ids = [env.id for env in (*config.orchestrator.env, *(evaluation.env if evaluation else ()))]
    looks_in = _looks_in(stack)
    if looks_in is not None and Path(looks_in[0]) == Path.cwd():
        return
    for name in dict.fromkeys(map(environment_module, ids)):
        found = next((path for path in (Path(f"{name}.py"), Path(name) / "__init__.py") if path.is_file()), None)
        is_installed = not name.isidentifier() or importlib.util.find_spec(name) is not None
        if found is None or is_installed:
            continue
        where = (
            "looks where its env-servers run"
            if looks_in is None
            else f"looks in {looks_in[0]} and its venv {looks_in[1]}"
        )
        print(
            f"note: ./{found} is here, and the stack at {server} {where}: start the stack here, put the file there, "
            "or train without it (unset MILLRACE_SERVER, no --server)",
            file=sys.stderr,
        )


def _describe(stack: RunningStack) -> str:
    made_by = "millrace up" if stack.is_shared else f"of {stack.directory.name} alone"
    return f"{stack.directory} ({made_by}, pid {stack.says['pid']})"


def _is_alive(pid: int, ticks: int) -> bool:
    """Whether the process that started then lives; without psutil (the client alone) no stack was started from here."""
    try:
        from millrace.processes import table
    except ModuleNotFoundError:
        return False
    try:
        return table.is_running(pid) and table.start_ticks(pid) == ticks
    except (OverflowError, ValueError):  # no number of a process
        return False


def _looks_in(stack: RunningStack | None) -> list[str] | None:
    said = stack.says.get("looks_in") if stack is not None else None
    is_pair = isinstance(said, list) and len(said) == 2 and all(isinstance(each, str) for each in said)
    return said if is_pair else None
