"""Mistakes of a first day at the real command: each run ends as FAILED within a minute and names the cause."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.internal.v1 import batch_pb2
from millrace.local.directory import free_ports
from millrace.rollouts.wire import decode_archive
from millrace_testing.patience import patient

pytestmark = [pytest.mark.long, pytest.mark.timeout(280)]

FAULTY = Path(__file__).resolve().parents[1] / "fixtures" / "environments" / "faulty_v0"
WITHIN_S = 60.0
SMALL = ("--orchestrator.batch-size", "64", "--orchestrator.rollouts-per-example", "8")
SMALL += ("--orchestrator.eval.num-examples", "4")
NO_FIRST_EVAL = "--orchestrator.eval.skip-first-step"


WITH_FAULTY = {"PYTHONPATH": str(FAULTY)}


@pytest.fixture(scope="module")
def server(warm) -> Iterator[dict[str, str]]:
    with warm.up(env=WITH_FAULTY) as address:
        yield {"MILLRACE_SERVER": address}
    assert warm.processes() == [], "failed runs leave nothing behind"


def faulty(mode: str, **args: str) -> list[str]:
    return ["--orchestrator.env", json.dumps([{"id": "faulty-v0", "args": {"modes": [mode], **args}}])]


REFUSED = ["--orchestrator.sampling.extra-body", json.dumps({"tool_choice": "required"})]
MISTAKES = {
    "reward-raises": (faulty("reward_raises"), ("reward bug", "faulty_v0.py", "env_error", "millrace env check")),
    "reward-nan": (faulty("reward_nan"), ("nan", "env_error", "millrace env check")),
    "tool-throws": (faulty("tool_error"), ("tool broke", "env_error")),
    "timeout": ([*faulty("sleep"), "--orchestrator.rollout-timeout-s", "1"], ("within 1 s", "rollout_timeout_s")),
    "refused": (REFUSED, ("tool_choice", "model_error", "orchestrator.sampling")),
}


@pytest.mark.parametrize(
    "mistake",
    MISTAKES,
)
def test_a_mistake_ends_the_run_and_is_named(warm, server, mistake: str) -> None:
    options, texts = MISTAKES[mistake]
    began = time.monotonic()
    code, output = warm.attempt(
        *("-m", "millrace.cli", "rl", "@", warm.rl_toml, "--name", mistake, *SMALL, NO_FIRST_EVAL, *options), env=server
    )
    seconds = time.monotonic() - began
    print(f"{mistake}: {seconds:.1f} s")
    assert code == 1 and seconds < patient(WITHIN_S), output[-3000:]
    end = output[output.rindex("\nError: ") :]
    assert f"Error: runs/{mistake} failed: " in end and "at: env-server [ROLLOUTS_FAILED]" in end
    for text in texts:
        assert text in end, text
    assert "rollouts fail: " in output, "and said so while it ran"
    assert "the first: " in warm.millrace("run", "show", mistake, env=server)
    assert texts[0] in warm.millrace("run", "why", mistake, env=server)
    assert len(output.splitlines()) < 100


def test_images_are_refused_when_the_environment_is_loaded(warm, server) -> None:
    options = faulty("ok", kind="image")
    code, output = warm.attempt(
        *("-m", "millrace.cli", "rl", "@", warm.rl_toml, "--name", "image", *SMALL, NO_FIRST_EVAL, *options), env=server
    )
    assert code == 1, output[-3000:]
    end = output[output.rindex("\nError: ") :]
    assert "Error: runs/image failed: " in end and "at: env-server [ENV_LOAD_FAILED]" in end
    for text in ("image_url", "faulty-v0", "text alone"):
        assert text in end, text
    assert "image_url" in warm.millrace("run", "why", "image", env=server)


def test_a_mistake_that_the_first_evaluation_meets_is_named_too(warm, server) -> None:
    code, output = warm.attempt(
        *("-m", "millrace.cli", "rl", "@", warm.rl_toml, "--name", "evaluated", *SMALL, *faulty("reward_raises")),
        env=server,
    )
    assert code == 1 and "at: env-server [EVAL_FAILED]" in output
    assert "reward bug" in output and "faulty_v0.py" in output and "millrace env check" in output


def test_the_next_run_starts_and_learns_as_ever(warm, server) -> None:
    summary, _ = warm.train(*SMALL, "--max-steps", "1", "--name", "after", env=server)
    assert summary["steps"] == 1


def test_kill_9_of_the_whole_stack_neither_resets_the_window_nor_counts_a_rollout_twice(warm) -> None:
    port, http_port = free_ports(2)
    address = f"127.0.0.1:{port}"
    place = ["up", "--dir", "outputs/window", "--listen", address, "--http-port", str(http_port)]
    submit = ["rl", "@", warm.rl_toml, "--name", "killed", *SMALL, NO_FIRST_EVAL, *faulty("reward_raises")]
    with warm.following(*place, env=WITH_FAULTY) as first:
        warm.read_until(first, "export MILLRACE_SERVER=")
        with warm.following(*submit, env={"MILLRACE_SERVER": address}) as client:
            assert client.stdout is not None
            assert any("rollouts fail: " in line for line in client.stdout)
            first.send_signal(signal.SIGKILL)
            first.wait(timeout=10)
            with warm.following(*place, env=WITH_FAULTY) as second:
                warm.read_until(second, "export MILLRACE_SERVER=")
                output, _ = client.communicate(timeout=200)
                second.send_signal(signal.SIGINT)
                second.communicate(timeout=30)
    assert client.returncode == 1 and "[ROLLOUTS_FAILED]" in output, output[-3000:]
    (path,) = (warm.path / "outputs" / "window").glob("**/batches/00000000.pb")
    header = batch_pb2.BatchHeader.FromString(path.read_bytes())
    store = path.parents[3]
    archived = decode_archive((store.parent / header.rollouts_key).read_bytes())
    counted = sum(each["num_rollouts"] for each in json.loads(header.orchestrator_state)["failures"]["environments"])
    assert counted == sum(each.is_environment_failure and not each.is_duplicate for each in archived) > 0
    assert len(header.resolutions) < 64 + 40, "64 groups fill the window, and some more were being played"
