"""Runs that train LoRA adapters survive what other runs do: the base stays, every version is an adapter on it, once."""

from typing import Any

import pytest

from millrace.policies.host_copy import read_manifest
from millrace.policies.manifest import PolicyManifest
from millrace.runlog.names import Names
from millrace.telemetry.faults import Point
from millrace_testing.chaos.run import ChaosRun
from millrace_testing.chaos.stack import PREFIX, ChaosStack

pytestmark = pytest.mark.long

LORA: dict[str, Any] = {"trainer.model.lora.rank": 4, "trainer.model.lora.alpha": 8.0, "trainer.optim.lr": 3e-3}
STEPS = 6


def manifests(chaos: ChaosStack, run: ChaosRun, versions: range) -> list[PolicyManifest]:
    names, store = Names(PREFIX, run.uid), chaos.store()
    return [read_manifest(store, names.policy_manifest(0, version)) for version in versions]


def test_killed_trainers_and_engines_leave_every_adapter_once_on_its_base(chaos: ChaosStack) -> None:
    before = chaos.pids()
    publish = chaos.arm(Point.TRAINER_BEFORE_MANIFEST, when={"version": 3})
    apply = chaos.arm(Point.INFERENCE_MID_APPLY, when={"version": 4})
    run = chaos.submit(max_steps=STEPS, **LORA)
    struck = {name: fault.wait(run) for name, fault in (("trainer", publish), ("inference", apply))}
    assert {name: record["pid"] for name, record in struck.items()} == {name: before[name] for name in struck}
    chaos.finish(run)
    base, *adapters = manifests(chaos, run, range(STEPS + 1))
    assert base.adapter is None
    assert all(found.adapter is not None and found.adapter.base_digest == base.digest for found in adapters)
    assert len({found.digest for found in adapters}) == STEPS
    for name, record in struck.items():
        print(f"{name}: {run.require_recovery(record['time'])}")


@pytest.mark.slow
def test_a_fork_goes_on_from_the_adapter_of_its_step(chaos: ChaosStack) -> None:
    parent = chaos.submit(max_steps=4, **LORA)
    chaos.finish(parent)
    fault = chaos.arm(Point.TRAINER_AFTER_STEP, when={"step": 5})
    run = chaos.fork(parent, "fork-adapter", "--step=4", "--max-steps=6")
    fault.wait(run)
    report = chaos.finish(run)
    assert (report.first_step, report.num_steps) == (4, 2)
    (start,), (first, last) = manifests(chaos, parent, range(4, 5)), manifests(chaos, run, range(4, 6))
    assert first.digest == start.digest and last.digest != first.digest
    assert first.adapter is not None and start.adapter is not None
    assert first.adapter.base_digest == start.adapter.base_digest
