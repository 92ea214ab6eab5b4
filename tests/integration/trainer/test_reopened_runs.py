"""The trainer of a run that had failed and was reopened: it steps over the closing header that counts no more."""

import json
from typing import Any

from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import pack_batch
from millrace.runlog import chain_hash, commit_batch
from millrace.runlog.rebuild import open_reopened
from millrace.runlog.records.revisions import find_closing, reopen

Recorder = Any  # conftest.Recorder; tests are not importable from one another


def commit(recorder: Recorder, step: int, *, revision: int = 0, failed: bool = False) -> None:
    """Commit a batch, or the closing header of a failure."""
    samples = [] if failed else recorder.make_samples(step)
    header = batch_pb2.BatchHeader(
        run_uid=recorder.uid,
        kind=batch_pb2.BATCH_KIND_CLOSE if failed else batch_pb2.BATCH_KIND_TRAIN,
        step=step,
        revision=revision,
        previous_chain_hash=recorder.chain,
        run_hash="ab" * 32,
        outcome=batch_pb2.RUN_OUTCOME_FAILED if failed else batch_pb2.RUN_OUTCOME_UNSPECIFIED,
        final_version=step if failed else 0,
    )
    data = recorder.call(commit_batch(recorder.log, recorder.epoch, header, pack_batch(header, samples), b""))
    recorder.chain = chain_hash(recorder.chain, data)


def reopen_run(recorder: Recorder) -> None:
    log = recorder.log
    closing = find_closing(log.store, log.names)
    assert closing is not None and reopen(log.store, log.names, closing, epoch=1, owner="test")
    opened = open_reopened(log.redis, log.store, prefix=log.names.prefix, uid=log.uid, owner="test")
    recorder.log = recorder.call(opened)
    assert recorder.log.generation > log.generation


def test_a_reopened_run_has_the_versions_of_one_that_never_failed(new_recorder: Any, make_config: Any) -> None:
    config = make_config(ckpt={"interval": 1, "keep_last": 2})
    unbroken = new_recorder()
    unbroken.record(config, steps=4)
    unbroken.train()
    recorder = new_recorder()
    recorder.create(config)
    for step in range(2):
        commit(recorder, step)
    commit(recorder, 2, failed=True)
    recorder.train()
    assert max(recorder.checkpoints()) == 2, "it consumed the closing header"
    reopen_run(recorder)
    commit(recorder, 2, revision=1, failed=True)  # and once more, at the same step
    reopen_run(recorder)
    commit(recorder, 2, revision=2)
    commit(recorder, 3)
    recorder.commit(4, recorder.make_samples(4, count=4, version=4), closing=True)
    recorder.train()
    assert recorder.digests() == unbroken.digests()
    key = recorder.log.names.checkpoint_manifest(4)
    assert json.loads(recorder.store.get(key))["step"] == 4
    recorder.forget_training()
    recorder.call(recorder.log.command("as at first", "HSET", recorder.log.names.meta, "base:policies", 0))
    recorder.train()
    assert recorder.digests() == unbroken.digests(), "also from the start model, over all of the chain"
