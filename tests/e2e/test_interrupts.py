"""However a command ends, nothing of it is left: Ctrl-C, SIGKILL, the death of a child; and runs of a server."""

import json
import signal
import time

import pytest

from millrace.processes.reaper import TERM_GRACE_S
from millrace.processes.table import KILL_WAIT_S

pytestmark = pytest.mark.long  # tests/integration/local does the same with services that only listen

SMALL = [
    *("--orchestrator.batch-size", "32", "--orchestrator.rollouts-per-example", "8"),
    *("--orchestrator.eval.num-examples", "4"),
]
PROCESSES = ("redis", "orchestrator", "env-server", "inference", "trainer")


@pytest.mark.timeout(400)  # two stacks
def test_ctrl_c_in_the_middle_of_a_run_and_again(warm) -> None:
    options = [*SMALL, "--max-steps", "4", "--run.name", "interrupted"]
    with warm.following("rl", "@", warm.rl_toml, *options) as process:
        warm.read_until(process, "step ")
        assert len(warm.processes()) >= len(PROCESSES) + 2, "the command, its reaper and the services"
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        rest, _ = process.communicate(timeout=30)
    assert process.returncode == 130, rest
    assert "all processes are stopped" in rest and "Traceback" not in rest
    assert time.monotonic() - began < 15
    assert warm.processes() == [], "nothing may outlive the command"
    with warm.following("rl", "@", warm.rl_toml, *options) as process:
        refused, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "a run called 'interrupted' exists" in refused and "--resume" in refused
    summary, output = warm.train(*options, "--resume")
    assert (summary["name"], summary["steps"], summary["state"]) == ("runs/interrupted", 4, "SUCCEEDED")
    assert "runs/interrupted goes on at step" in output
    assert warm.processes() == []


def test_sigkill_of_the_command_leaves_nothing(warm) -> None:
    with warm.following("rl", "@", warm.rl_toml, *SMALL) as process:
        warm.read_until(process, "step ")
        process.kill()
        process.communicate(timeout=10)
        assert TERM_GRACE_S + KILL_WAIT_S <= 10
        warm.wait_empty(timeout_s=10)


def test_a_child_that_dies_is_named_and_started_again(warm) -> None:
    options = [*SMALL, "--max-steps", "6", "--run.name", "dies"]
    with warm.following("rl", "@", warm.rl_toml, *options) as process:
        warm.read_until(process, "step ")
        [child] = [each for each in warm.processes() if "millrace.inference.main" in each.cmdline()]
        child.kill()
        rest, _ = process.communicate(timeout=100)
    assert process.returncode == 0, rest
    assert "inference died: signal SIGKILL; started again (restart 1)" in rest
    assert "step   6/6" in rest and "Traceback" not in rest
    assert warm.processes() == []


def test_runs_of_a_server(warm) -> None:
    with warm.up() as address:
        server = {"MILLRACE_SERVER": address}
        summary, output = warm.train("--max-steps", "2", *SMALL, "--name", "remote", env=server)
        assert summary["steps"] == 2 and summary["name"] == "runs/remote" and "submitted runs/remote" in output

        def run(*argv: str) -> tuple[int, str]:
            return warm.attempt("-m", "millrace.cli", "run", *argv, env=server)

        code, output = run("list")
        assert code == 0 and [line.split()[:3] for line in output.splitlines()[1:]] == [["remote", "SUCCEEDED", "2/2"]]
        code, output = run("show", "remote", "-o", "json")
        assert code == 0 and json.loads(output)["state"] == "RUN_STATE_SUCCEEDED"
        code, output = run("watch", "remote")
        assert code == 0 and "step   2/2" in output and "STOPPING -> SUCCEEDED" in output
        code, output = run("show", "nobody")
        assert code == 3 and "there is no run 'nobody'" in output and "remedy:" in output
        code, output = run("cancel", "remote")
        assert code == 2 and "has already ended as SUCCEEDED" in output
        _cancel_a_running_run(warm, run, server)
    assert warm.processes() == []


def _cancel_a_running_run(warm, run, server: dict[str, str]) -> None:
    code, output = run("submit", "@", warm.rl_toml, *SMALL, "--max-steps", "1000", "--name", "endless")
    assert code == 0 and "submitted runs/endless" in output
    with warm.following("run", "watch", "endless", env=server) as watcher:
        warm.read_until(watcher, "step ")
        code, output = run("why", "endless")
        assert code == 0 and "waits for" in output
        code, output = run("cancel", "endless", "--reason", "the test is over")
        assert code == 0 and "runs/endless is asked to end (now RUNNING)" in output
        rest, _ = watcher.communicate(timeout=60)
    assert watcher.returncode == 1 and "runs/endless ended as CANCELLED" in rest
    code, output = run("show", "endless")
    assert code == 0 and "CANCELLED" in output
    code, _ = run("cancel", "endless")
    assert code == 0, "asking twice is no error"
    code, output = run("list", "--state", "cancelled")
    assert code == 0 and output.splitlines()[1].startswith("endless")
