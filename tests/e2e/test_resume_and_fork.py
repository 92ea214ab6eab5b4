"""`--resume` and `--ckpt.resume_step` on the real stack: a fork trains on, and its parent's log is never rewritten."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from millrace_testing.workplaces import Workplace

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SMALL = ("--ckpt.interval", "2", "--orchestrator.batch_size", "64", "--orchestrator.eval.num_examples", "4")


def headers(workplace: Workplace) -> dict[Path, bytes]:
    """Return every object of every run's log."""
    return {
        path: path.read_bytes() for path in workplace.path.glob("outputs/*/store/**/batches/**/*") if path.is_file()
    }


def uids(paths: Iterable[Path]) -> set[str]:
    """Of which runs these objects are; other tests leave runs in the workplace, too."""
    return {path.parts[path.parts.index("batches") - 1] for path in paths}


def rl(workplace: Workplace, *argv: str) -> tuple[int, str]:
    return workplace.attempt("-m", "millrace.cli", "rl", "@", workplace.rl_toml, *SMALL, *argv, timeout_s=280)


def test_a_step_below_the_head_begins_a_fork_and_the_parent_stays_as_it_is(warm: Workplace) -> None:
    code, output = rl(warm, "--max-steps", "4", "--name", "letters")
    assert code == 0, output[-3000:]
    before = headers(warm)
    assert before
    code, output = rl(warm, "--max-steps", "4", "--name", "letters")
    assert code == 2 and "a run called 'letters' exists" in output and "--resume" in output, "never a silent second one"
    code, output = rl(warm, "--max-steps", "4", "--name", "letters", "--resume")
    assert code != 0 and "letters has ended as SUCCEEDED at step 4" in output and "--ckpt.resume_step 4" in output
    code, output = rl(
        warm, "--max-steps", "6", "--name", "letters", "--ckpt.resume_step", "2", "--trainer.optim.lr", "1e-4"
    )
    assert code == 0, output[-3000:]
    assert "letters-from-2" in output
    assert "\nstep   3/6" in output and "\nstep   6/6" in output and "\nstep   2/6" not in output, output[-3000:]
    after = headers(warm)
    assert {path: after[path] for path in before} == before, "the parent's log is the same, byte for byte"
    assert len(uids(after) - uids(before)) == 1, "a fork is a run of its own"
    assert rl(warm, "--max-steps", "6", "--name", "nobody", "--ckpt.resume_step", "2")[0] != 0
