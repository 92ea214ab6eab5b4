"""Every preset on the real stack: exact data, and the same policies through kill -9 of trainer and orchestrator.

The undisturbed run is one training over the same log, in this process, from its first batch to its last.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.config.filling import PRESETS
from millrace.readers.replay import replay
from millrace.runlog import Names
from millrace.telemetry.faults import Point
from millrace_testing import teachers
from millrace_testing.chaos.policies import published, recomputed
from millrace_testing.chaos.stack import PREFIX, ChaosStack

IN_THE_LONG_SUITE = ("dapo", "gspo")
STEPS = 5
KILLS = {Point.ORCHESTRATOR_AFTER_HEADER: {"step": 2}, Point.TRAINER_AFTER_STEP: {"step": 3}}
"""The trainer dies after checkpoint 2, so that its successor computes version 3 again."""
SAMPLING = ("--orchestrator.sampling.temperature=0.8", "--orchestrator.sampling.top-p=0.9")
"""What is trained is the distribution that was sampled from. Refused for opd and opsd, whose teachers score alike."""


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(name, marks=pytest.mark.long if name in IN_THE_LONG_SUITE else pytest.mark.presets)
        for name in PRESETS
    ],
)
def test_a_preset_trains_on_exact_data_and_alike_through_kills(chaos: ChaosStack, tmp_path: Path, preset: str) -> None:
    if preset == "opd":  # a teacher that knows less than the student differs from it as well
        with teachers.serving(chaos.workplace, tmp_path, model="base") as url:
            _prove(chaos, preset, *teachers.flags(url))
    elif preset == "opsd":
        _prove(chaos, preset, "--orchestrator.algo.demo-key=answer")
    else:
        _prove(chaos, preset, *SAMPLING)


@pytest.mark.presets
def test_echo_learns_what_the_environment_said_alike_through_kills(chaos: ChaosStack) -> None:
    algo = '{"type": "echo", "roles": {"user": {"alpha": 0.5}}}'
    flags = ("--orchestrator.env", '[{"id": "code-lookup"}]', "--seq-len", "256", "--orchestrator.algo", algo)
    steps = _prove(chaos, None, *flags, "--orchestrator.sampling.max-tokens", "16")
    assert all(step.metrics["nll/mean"] > 0 for step in steps.values()), steps[0].metrics


@pytest.mark.presets
def test_rows_of_a_dataset_are_learned_beside_rollouts_alike_through_kills(chaos: ChaosStack, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    words = ("abc", "bcd", "cde", "def", "efg", "fgh", "ghi")
    path.write_text("".join(json.dumps({"prompt": word, "completion": word[::-1]}) + "\n" for word in words))
    dataset = json.dumps({"name": str(path), "rows_per_step": 3, "weight": 0.5})
    steps = _prove(chaos, "gspo", *SAMPLING, "--trainer.dataset", dataset)
    assert all(step.metrics["dataset_nll/mean"] > 0 for step in steps.values()), steps[0].metrics


def _prove(chaos: ChaosStack, preset: str | None, *flags: str) -> dict[int, Any]:
    armed = [chaos.arm(point, when=when) for point, when in KILLS.items()]
    run = chaos.submit(
        None,
        *([] if preset is None else [f"--algo.preset={preset}"]),
        *flags,
        max_steps=STEPS,
        async_level=0,
        **{"ckpt.interval": 2, "trainer.determinism": "strict"},
    )
    chaos.finish(run)
    assert len({fault.wait()["pid"] for fault in armed}) == len(KILLS)

    steps = {event.step_completed.step: event.step_completed for event in run.of("step_completed")}
    assert sorted(steps) == list(range(STEPS)) and {step.staleness_max for step in steps.values()} == {0}
    mismatch = {number: step.metrics["mismatch_kl/mean"] for number, step in steps.items()}
    print(f"{preset}: largest mismatch_kl {max(mismatch.values()):.1e}")
    assert all(0 <= value <= 1e-6 for value in mismatch.values()), mismatch

    store, names = chaos.store(), Names(PREFIX, run.uid)
    made = published(store, names)
    assert sorted(made) == list(range(STEPS + 1)) and len(set(made.values())) == STEPS + 1
    assert recomputed(store, names, steps=STEPS) == made
    report = replay(store, names, step=3)
    assert report.start == 2 and report.is_equal, report.differences
    return steps
