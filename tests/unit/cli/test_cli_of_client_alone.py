"""`millrace[client]` has the base dependencies alone: what submits and follows a run imports nothing else."""

import subprocess
import sys

import pytest

SCRIPT = """
import pathlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {
            "numpy", "redis", "boto3", "botocore", "zstandard", "aiohttp", "torch", "psutil", "fastapi", "uvicorn",
        }:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import millrace.cli.commands.rl, millrace.cli.commands.run.group
import millrace.cli.connection, millrace.cli.session.follow, millrace.cli.session.prepare
import millrace.cli.session.results, millrace.cli.session.run_session
import millrace.cli.view.records, millrace.cli.view.view, millrace.cli.view.records, millrace.cli.view.output
from millrace.cli.offline.ended import find_ended, list_ended
from millrace.cli.offline.run_store import snapshots_here, snapshots_of_server
nowhere = pathlib.Path("/nonexistent")
assert find_ended("nobody", root=nowhere) is None and not list(list_ended(note=print, root=nowhere))
assert snapshots_here(["nobody"], store=None, prefix=None, note=print) == {}
print("imported")
"""

NAMED = ("show", "watch", "logs", "why", "pause", "cancel", "resume", "delete")
COMMANDS = ("list", *(f"{command} nobody" for command in NAMED), "fork nobody --step 1 --name another")
RUN_ALL = """
from millrace.cli.main import main
for command in COMMANDS:
    sys.argv = ["millrace", "run", *command.split(), "--server", "localhost:1"]
    try:
        main()
    except SystemExit as ended:
        print(command, ended.code, file=sys.stderr)
"""


@pytest.mark.computes
def test_commands_that_ask_a_server_get_as_far_as_the_server() -> None:
    script = f"{SCRIPT}\nCOMMANDS = {COMMANDS!r}\n{RUN_ALL}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert "needs the package" not in done.stderr, done.stderr
    assert done.stderr.count("cannot reach the orchestrator at localhost:1") == len(COMMANDS), done.stderr


@pytest.mark.computes
def test_submitting_and_following_need_no_package_of_the_services() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "imported" in done.stdout, done.stderr
