"""`millrace[client]` has the base dependencies alone: what submits and follows a run imports nothing else."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys

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
from millrace.cli.offline.run_store import snapshots_here, snapshots_of_server
assert snapshots_here(["nobody"], store=None, prefix=None, note=print) == {}
print("imported")
"""


@pytest.mark.computes
def test_submitting_and_following_need_no_package_of_the_services() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "imported" in done.stdout, done.stderr
