"""A real run is forked while it goes on, and again after it has ended; `millrace run audit` finds all of them clean."""

import json

import pytest

from millrace.runlog.names import Names
from millrace_testing.chaos.run import ChaosRun
from millrace_testing.chaos.stack import PREFIX, ChaosStack

pytestmark = pytest.mark.long


def digest(chaos: ChaosStack, run: ChaosRun, version: int) -> str:
    return json.loads(chaos.store().get(Names(PREFIX, run.uid).policy_manifest(0, version)))["digest"]


def audit(chaos: ChaosStack, run: ChaosRun) -> dict:
    said = chaos.workplace.millrace("run", "audit", run.name, "--server", chaos.address, "--json")
    return json.loads(said[said.index("{") :])


def test_a_run_is_forked_while_it_goes_on_and_after_it_has_ended(chaos: ChaosStack) -> None:
    parent = chaos.submit(max_steps=5)
    parent.wait_step(3)
    early = chaos.fork(parent, "fork-early", "--step=3", "--max-steps=4")  # checkpoint 2, and step 2 computed again
    chaos.finish(parent)
    root = Names(PREFIX, parent.uid).root
    before = {info.key: chaos.store().get(info.key) for info in chaos.store().list(root)}

    late = chaos.fork(parent, "fork-late", "--step=4", "--max-steps=6", "--trainer.optim.lr=1e-4")  # checkpoint 4
    report = chaos.finish(early)
    assert (report.first_step, report.num_steps) == (2, 2)
    assert digest(chaos, early, 2) == digest(chaos, parent, 2)
    assert digest(chaos, early, 3) == digest(chaos, parent, 3), "its start is the parent's version, bit for bit"
    assert sorted(early.steps()) == [2, 3]

    report = chaos.finish(late)
    assert (report.first_step, report.num_steps) == (4, 2)
    assert digest(chaos, late, 4) == digest(chaos, parent, 4)
    assert digest(chaos, late, 5) != digest(chaos, parent, 5), "from there on it trains for itself"

    assert {info.key: chaos.store().get(info.key) for info in chaos.store().list(root)} == before, "it was only read"
    for run in (parent, early, late):
        found = audit(chaos, run)
        assert found["violations"] == [] and found["run"] == run.name
