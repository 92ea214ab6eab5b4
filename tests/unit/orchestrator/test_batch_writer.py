"""What a driver goes on from after the last committed header."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.internal.v1 import batch_pb2
from millrace.orchestrator.drive.batch_writer import BatchWriter, encode_state
from millrace.orchestrator.play.book import Book
from millrace.orchestrator.play.failures import EnvCount, Failures, GroupCount, Tally
from millrace.runlog.records.run_record import RunOrigin
from millrace.runlog.recover import Committed

GROUPS, SIZE = 4, 2


@pytest.mark.parametrize(("writer_epoch", "fails"), [(1, True), (0, False)], ids=["its own", "copied for a fork"])
def test_the_failed_groups_of_the_parent_do_not_end_a_fork(writer_epoch: int, fails: bool) -> None:
    failed = Counter({"env_error": SIZE})
    tally = Tally(
        environments={"e": EnvCount(env="e", num_rollouts=GROUPS * SIZE, failed=Counter(failed), first_error="E: no")},
        groups=[GroupCount(env="e", num_rollouts=SIZE, failed=Counter(failed)) for _ in range(GROUPS)],
    )
    state = encode_state(next_ordinal=GROUPS, num_duplicates=0, read_until="", failures=tally)
    header = batch_pb2.BatchHeader(
        kind=batch_pb2.BATCH_KIND_TRAIN, step=0, writer_epoch=writer_epoch, orchestrator_state=state
    )
    nothing: Any = SimpleNamespace(log=None)
    failures = Failures(num_groups=GROUPS, group_sizes={"reverse-text": SIZE}, max_share=0.9)
    writer = BatchWriter(nothing, book=Book(), envs=nothing, stream=nothing, failures=failures, seq_len=1)
    committed = Committed(last=header, chain=bytes(32), is_reopened=False)
    writer.restore(committed, origin=RunOrigin())
    assert (failures.error() is not None) == fails
