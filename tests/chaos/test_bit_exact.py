"""On the real stack: what a trainer that is killed everywhere makes is what one makes that is never killed.

The log of the run is trained on again in this process, from its first batch to its last, without a break. Schedule,
clipping and two ranks, over recorded logs: tests/integration/trainer/test_trainer_bit_exact.py.
"""

import json
import shutil
import textwrap
from pathlib import Path

import pytest

from millrace.local import stack as preloads
from millrace.runlog import Names
from millrace.telemetry.faults import Point
from millrace.v1 import run_pb2
from millrace_testing.chaos.policies import published, recomputed
from millrace_testing.chaos.run import ChaosRun
from millrace_testing.chaos.stack import PREFIX, ChaosStack

pytestmark = pytest.mark.slow

STEPS = 10
KILLS = {
    Point.TRAINER_MID_BACKWARD: {"step": 1},
    Point.TRAINER_AFTER_STEP: {"step": 2},
    Point.TRAINER_AFTER_MANIFEST: {"version": 4},
    Point.TRAINER_BEFORE_UPLOAD: {"version": 5},
    Point.TRAINER_BEFORE_MANIFEST: {"version": 7},
    Point.TRAINER_AFTER_PUBLISH: {"step": 5},
    Point.TRAINER_MID_RESUME: {"step": 4},
    Point.TRAINER_MID_CHECKPOINT: {"step": 6},
}
# Found on the stack's PYTHONPATH by every process: makes the trainer differ from the one before while a file exists.
SITE = """
import sys
from pathlib import Path

if "millrace.trainer.main" in sys.orig_argv and Path({marker!r}).exists():
    from millrace.trainer.learning import optimizer as scheduler

    learning_rate = scheduler.learning_rate
    scheduler.learning_rate = lambda *args, **options: 1.001 * learning_rate(*args, **options)
"""


def test_a_run_whose_trainer_dies_everywhere_equals_an_unbroken_one(chaos: ChaosStack) -> None:
    model = chaos.directory / "dropout-model"
    shutil.copytree(chaos.workplace.path / "outputs/reverse-text/sft/model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.2}))
    armed = [chaos.arm(point, when=when) for point, when in KILLS.items()]
    run = chaos.submit(
        max_steps=STEPS,
        **{
            "model.name": str(model),
            "ckpt.interval": 2,
            "trainer.determinism": "strict",
            "trainer.model.dropout": "true",
            "trainer.optim.max_norm": 0.1,
        },
    )
    chaos.finish(run)
    records = [fault.wait() for fault in armed]
    assert len({record["pid"] for record in records}) == len(KILLS)
    for record, point in zip(records, KILLS, strict=True):
        print(f"{point.value}: next progress after {run.recovery_s(record['time']):.1f} s")
    names = Names(PREFIX, run.uid)
    made = published(chaos.store(), names)
    assert sorted(made) == list(range(STEPS + 1)) and len(set(made.values())) == STEPS + 1
    assert recomputed(chaos.store(), names, steps=STEPS) == made


def _killed_and_replaced_by_another(make_chaos, tmp_path: Path, determinism: str) -> tuple[ChaosStack, ChaosRun]:
    """Return a run whose trainer dies at step 3 after checkpoint 2, and whose next trainer computes something else."""
    marker = tmp_path / "differ"
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(SITE.format(marker=str(marker))))
    stack = make_chaos(env={"PYTHONPATH": str(tmp_path), preloads.VARIABLE: "0"})
    fault = stack.arm(Point.TRAINER_AFTER_PUBLISH, when={"step": 3})
    run = stack.submit(max_steps=6, **{"ckpt.interval": 2, "trainer.determinism": determinism})
    marker.touch()  # the trainer of now has started without it
    fault.wait(run)
    return stack, run


def test_under_strict_a_trainer_that_differs_fails_the_run(make_chaos, tmp_path: Path) -> None:
    stack, run = _killed_and_replaced_by_another(make_chaos, tmp_path, "strict")
    change = run.wait_state(run_pb2.RUN_STATE_FAILED).state_changed
    made = published(stack.store(), Names(PREFIX, run.uid))
    assert "POLICY_DIGEST_MISMATCH" in (change.reason, change.error.reason)
    message = change.error.message
    assert made[3] in message and "0-3" in message and "this trainer computed" in message
    assert sorted(made) == [0, 1, 2, 3, 4]


def test_under_best_effort_a_trainer_that_differs_begins_a_lineage(make_chaos, tmp_path: Path) -> None:
    stack, run = _killed_and_replaced_by_another(make_chaos, tmp_path, "best_effort")
    stack.finish(run)
    assert [reason for reason, _ in run.warnings()].count("NEW_LINEAGE") >= 1
    made = [(e.policy_published.lineage, e.policy_published.version) for e in run.of("policy_published")]
    assert made[-1] == (1, 6) and (1, 5) in made and (0, 5) not in made
