"""Kills in the middle of retention: the run ends by itself, nothing that it needs is gone, its audit is clean, and
every version has the bits of an unbroken training over all batches, of those that were retired, too.
"""

import os
import threading
from pathlib import Path

import pytest

from millrace.policies.fetch import prove_policies
from millrace.readers.audit import Depth, audit_run
from millrace.runlog import Names
from millrace.runlog.catalogue import KeptAs
from millrace.runlog.records.retirement import newest_retirement
from millrace.runlog.retention import keys_at
from millrace.storage.local import LocalStore
from millrace.telemetry.faults import Point
from millrace_testing.chaos import loop as chaos_loop
from millrace_testing.chaos.policies import published, recomputed
from millrace_testing.chaos.rows import RETENTION, Row
from millrace_testing.chaos.stack import PREFIX, ChaosStack
from millrace_testing.polling import block_until

pytestmark = pytest.mark.long

ROWS = {
    "orchestrator, record written": Row("orchestrator", Point.ORCHESTRATOR_RETIRED, {"step": 5}),
    "orchestrator, in the middle of a pass": Row("orchestrator", Point.ORCHESTRATOR_MID_RETIRE, {}),
    "trainer, record of checkpoints written": Row("trainer", Point.TRAINER_RETIRED, {"step": 4}),
    "trainer, after a step": Row("trainer", Point.TRAINER_AFTER_STEP, {"step": 7}),
}


class Mirror:
    """Hard links to all objects that a directory store has ever had, made while others write and delete there."""

    def __init__(self, store: Path, mirror: Path) -> None:
        """Begin to link what is in `store` into `mirror`, again and again until `end`."""
        self._store, self._mirror = store, mirror
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Link what is there now, and stop."""
        self._ends.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ends.wait(0.02):
            self._link()
        self._link()

    def _link(self) -> None:
        for directory, below, files in os.walk(self._store):
            below[:] = [name for name in below if not name.startswith(".")]
            copies = self._mirror / Path(directory).relative_to(self._store)
            copies.mkdir(parents=True, exist_ok=True)
            have = set(os.listdir(copies))
            for name in files:
                if name not in have:
                    try:
                        (copies / name).hardlink_to(Path(directory) / name)
                    except FileNotFoundError:  # it was deleted since the walk saw it: the test misses it by name
                        continue


def test_kills_during_retention_lose_nothing_that_is_needed_and_change_no_bit(
    chaos: ChaosStack, tmp_path: Path
) -> None:
    mirror = Mirror(chaos.store_directory, tmp_path / "mirror")
    armed = [chaos.arm(row.point, when=row.when) for row in ROWS.values()]
    run = chaos.submit(max_steps=10, **RETENTION, **{"trainer.determinism": "strict"})
    report = chaos.finish(run)
    assert len({fault.wait(run)["pid"] for fault in armed}) == len(ROWS), "each row killed a process of its own"
    store, names = chaos.store(), Names(PREFIX, run.uid)
    # The run is SUCCEEDED before its last pass of retention, which the seal follows.
    block_until(lambda: store.head(names.seal(0)) is not None, timeout_s=120, what="the seal")
    mirror.end()
    record = newest_retirement(store, names)
    assert record is not None and record.of(KeptAs.BATCHES).below >= 4 and record.of(KeptAs.CHECKPOINTS).below == 8
    assert "RETIRED" in {each.check for each in report.notes}
    for step in range(record.of(KeptAs.BATCHES).below):
        assert keys_at(store, names, KeptAs.BATCHES, step=step) == [], "who came next has ended the pass"
    depth = Depth(is_deep=True, prove=prove_policies)
    deep = chaos_loop.call(audit_run(None, store, prefix=PREFIX, uid=run.uid, depth=depth))
    assert list(deep.violations) == []
    everything = LocalStore(tmp_path / "mirror")
    made = published(everything, names)
    assert sorted(made) == list(range(11)) and len(set(made.values())) == 11
    assert recomputed(everything, names, steps=10) == made
