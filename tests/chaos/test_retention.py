"""Kills in the middle of retention: the run ends by itself, nothing that it needs is gone, its audit is clean."""

import pytest

from millrace.policies.fetch import prove_policies
from millrace.readers.audit import Depth, audit_run
from millrace.runlog import Names
from millrace.runlog.catalogue import KeptAs
from millrace.runlog.records.retirement import newest_retirement
from millrace.runlog.retention import keys_at
from millrace.telemetry.faults import Point
from millrace_testing.chaos import loop as chaos_loop
from millrace_testing.chaos.rows import Row
from millrace_testing.chaos.stack import PREFIX, ChaosStack
from millrace_testing.polling import block_until

pytestmark = pytest.mark.long

RETENTION = {
    "ckpt.interval": 2,
    "ckpt.keep_last": 2,
    "orchestrator.retain_batches": 2,
    "orchestrator.retain_policies": 2,
    "trainer.policy.anchor_interval": 2,
}
ROWS = {
    "orchestrator, record written": Row("orchestrator", Point.ORCHESTRATOR_RETIRED, {"step": 5}),
    "orchestrator, in the middle of a pass": Row("orchestrator", Point.ORCHESTRATOR_MID_RETIRE, {}),
    "trainer, record of checkpoints written": Row("trainer", Point.TRAINER_RETIRED, {"step": 4}),
    "trainer, after a step": Row("trainer", Point.TRAINER_AFTER_STEP, {"step": 7}),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_kill_during_retention_loses_nothing_that_is_needed(chaos: ChaosStack, row: str) -> None:
    victim, point, when = ROWS[row].victim, ROWS[row].point, ROWS[row].when
    fault = chaos.arm(point, when=when)
    before = chaos.pid(victim)
    run = chaos.submit(max_steps=10, **RETENTION)
    assert fault.wait(run)["pid"] == before
    report = chaos.finish(run)
    store, names = chaos.store(), Names(PREFIX, run.uid)
    # The run is SUCCEEDED before its last pass of retention, which the seal follows.
    block_until(lambda: store.head(names.seal(0)) is not None, timeout_s=120, what="the seal")
    record = newest_retirement(store, names)
    assert record is not None and record.of(KeptAs.BATCHES).below >= 4 and record.of(KeptAs.CHECKPOINTS).below == 8
    assert "RETIRED" in {each.check for each in report.notes}
    for step in range(record.of(KeptAs.BATCHES).below):
        assert keys_at(store, names, KeptAs.BATCHES, step=step) == [], "who came next has ended the pass"
    depth = Depth(is_deep=True, prove=prove_policies)
    deep = chaos_loop.call(audit_run(None, store, prefix=PREFIX, uid=run.uid, depth=depth))
    assert list(deep.violations) == []
