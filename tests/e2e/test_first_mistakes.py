"""Mistakes of a first day at the real command: each run ends as FAILED within a minute and names the cause."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace_testing.patience import patient

FAULTY = Path(__file__).resolve().parents[1] / "fixtures" / "environments" / "faulty_v0"
WITHIN_S = 60.0
SMALL = ("--orchestrator.batch-size", "64", "--orchestrator.rollouts-per-example", "8")
SMALL += ("--orchestrator.eval.num-examples", "4")
NO_FIRST_EVAL = "--orchestrator.eval.skip-first-step"


@pytest.fixture(scope="module")
def server(warm) -> Iterator[dict[str, str]]:
    with warm.up(env={"PYTHONPATH": str(FAULTY)}) as address:
        yield {"MILLRACE_SERVER": address}
    assert warm.processes() == [], "failed runs leave nothing behind"


def faulty(mode: str) -> list[str]:
    return ["--orchestrator.env", json.dumps([{"id": "faulty-v0", "args": {"modes": [mode]}}])]


REFUSED = ["--orchestrator.sampling.extra-body", json.dumps({"logit_bias": {"7": 5}})]
MISTAKES = {
    "reward-raises": (faulty("reward_raises"), ("reward bug", "faulty_v0.py", "env_error", "millrace env check")),
    "reward-nan": (faulty("reward_nan"), ("nan", "env_error", "millrace env check")),
    "tool-throws": (faulty("tool_error"), ("tool broke", "env_error")),
    "timeout": ([*faulty("sleep"), "--orchestrator.rollout-timeout-s", "1"], ("within 1 s", "rollout_timeout_s")),
    "refused": (REFUSED, ("logit_bias", "model_error", "orchestrator.sampling")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_the_run_and_is_named(warm, server, mistake: str) -> None:
    options, texts = MISTAKES[mistake]
    began = time.monotonic()
    code, output = warm.attempt(
        *("-m", "millrace.cli", "rl", "@", warm.rl_toml, "--name", mistake, *SMALL, NO_FIRST_EVAL, *options), env=server
    )
    seconds = time.monotonic() - began
    print(f"{mistake}: {seconds:.1f} s")
    assert code == 1 and seconds < patient(WITHIN_S), output[-3000:]
    end = next(line for line in output.splitlines() if line.startswith("Error: "))
    assert f"Error: runs/{mistake} failed: " in end and "[ROLLOUTS_FAILED] (env-server)" in end
    for text in texts:
        assert text in end, text
    assert "rollouts fail: " in output, "and said so while it ran"
    assert "the first: " in warm.millrace("run", "show", mistake, env=server)
    assert texts[0] in warm.millrace("run", "why", mistake, env=server)
    assert len(output.splitlines()) < 100


def test_a_mistake_that_the_first_evaluation_meets_is_named_too(warm, server) -> None:
    code, output = warm.attempt(
        *("-m", "millrace.cli", "rl", "@", warm.rl_toml, "--name", "evaluated", *SMALL, *faulty("reward_raises")),
        env=server,
    )
    assert code == 1 and "[EVAL_FAILED] (env-server)" in output
    assert "reward bug" in output and "faulty_v0.py" in output and "millrace env check" in output


def test_the_next_run_starts_and_learns_as_ever(warm, server) -> None:
    summary, _ = warm.train(*SMALL, "--max-steps", "1", "--name", "after", env=server)
    assert summary["steps"] == 1
