"""Clocks that disagree by hours: order is by ids, and holders count their leases on their own monotonic clocks."""

import json
from pathlib import Path

from chaos_stack import ChaosStack

HOUR = 3600
SKEW = {
    "millrace.orchestrator.main": HOUR,
    "millrace.trainer.main": -HOUR,
    "millrace.env_server.main": 24 * HOUR,
    "millrace.env_server.worker": 24 * HOUR,
    "millrace.env_server.template": 24 * HOUR,  # workers are copies of it
    "millrace.inference.main": -24 * HOUR,
}


def test_a_run_with_skewed_clocks_survives_kills(make_chaos) -> None:
    skewed = {"PYTHONPATH": str(Path(__file__).with_name("skew")), "CLOCK_SKEW": json.dumps(SKEW)}
    stack: ChaosStack = make_chaos(env=skewed)
    run = stack.submit(max_steps=12)
    for name, step in (("orchestrator", 2), ("trainer", 4)):
        run.wait_step(step)
        stack.kill(name)
    stack.finish(run)
    written = {kind: event.time.seconds for kind in ("batch_committed", "step_completed") for event in run.of(kind)}
    assert written["batch_committed"] - written["step_completed"] > HOUR, "the clocks were not skewed"
    assert list(dict.fromkeys(run.steps())) == list(range(12)), "in order by ids, whatever the clocks say"
