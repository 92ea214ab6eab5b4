"""Attestations and seals that change places, and what comes behind the seal of a run that failed.

Of the other kinds two change places in `test_tamperings.py`. Each is whole and of its run, so that only a hash that
names it, or what it says itself, tells that it stands elsewhere.
"""

from collections.abc import Iterator

import pytest

from millrace.internal.v1 import batch_pb2
from millrace.runlog import chain_hash, commit_batch
from millrace.runlog.attest import unsigned, write_attestation
from millrace.runlog.catalogue import CHECKPOINT_OBJECT, EPOCH, KINDS, QUARANTINED, RUN_JSON, SCORES
from millrace.runlog.rebuild import open_reopened
from millrace.runlog.records.numbered import create_epoch, write_intent
from millrace.runlog.records.revisions import find_closing, reopen
from millrace.runlog.seal import write_seal
from millrace_testing.runlog.committed import known_by
from millrace_testing.runlog.recorded_log import STEPS as FEW_STEPS
from millrace_testing.runlog.recorded_log import Recorded, audit, record, violations
from millrace_testing.runlog.scene import STEPS, Scene, record_scene
from millrace_testing.runlog.tamperings import IN_PAIRS, add


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, redis_url) -> Scene:
    return record_scene(tmp_path_factory.mktemp("recorded"), redis_url)


@pytest.fixture
def scene(recorded) -> Iterator[Scene]:
    yield recorded
    recorded.store.undo()


@pytest.mark.parametrize("way", IN_PAIRS, ids=lambda way: way.__name__)
def test_attestations_that_change_places_are_found_without_the_key(scene, way) -> None:
    names, kept = scene.names, scene.kept
    chain = bytes.fromhex(kept.chain_hash)
    draft = unsigned(names, run="demo", step=STEPS, chain=chain, seal_sha256=kept.seal_sha256)
    write_attestation(scene.store, names, draft, scene.key)
    assert list(scene.audit("deep").violations) == [], "an attestation is no addition"
    way(scene, names.attestation(1), [names.attestation(1), names.attestation(2)])
    assert {each.check for each in scene.audit("fast").violations} == {"ATTESTATION_MISNAMED"}


# A run that failed, was reopened and failed again, sealed both times.


async def close(run: Recorded, step: int, revision: int, *, number: int) -> None:
    """Commit a closing header of a failed run, and seal it."""
    epoch = await run.log.acquire_epoch("orchestrator", "o")
    header = batch_pb2.BatchHeader(run_uid=run.log.uid, run_hash=run.log.run_hash, kind=batch_pb2.BATCH_KIND_CLOSE)
    header.step, header.revision, header.final_version = step, revision, step
    header.writer_epoch, header.previous_chain_hash = epoch.number, run.chain
    ordinal = run.headers[-1].resolved_below
    header.resolved_below, header.outcome = ordinal + 1, batch_pb2.RUN_OUTCOME_FAILED
    header.resolutions.add(ordinal=ordinal, outcome=batch_pb2.ORDINAL_OUTCOME_DROPPED, reason="run_failed")
    stored = await commit_batch(run.log, epoch, header, [], b"", known=known_by(run.headers))
    run.chain = chain_hash(run.chain, stored)
    run.headers.append(batch_pb2.BatchHeader.FromString(stored))
    known, key = known_by(run.headers), run.names.seal(number)
    assert write_seal(run.store, run.names, key, known, chain=run.chain, state="FAILED", by="test")


@pytest.fixture
async def failed(log, redis, local_store) -> Recorded:
    """Return one that has failed once."""
    return await record(log, redis, local_store, checkpoints=(1,), ends="FAILED")


@pytest.mark.parametrize("way", IN_PAIRS, ids=lambda way: way.__name__)
async def test_seals_that_change_places_are_found(failed: Recorded, redis, local_store, way) -> None:
    run, names = failed, failed.names
    found = find_closing(local_store, names)
    assert found is not None
    epoch = await create_epoch(local_store, names, "orchestrator", "o")
    assert reopen(local_store, names, found, epoch=epoch.number, owner="o")
    run.log = await open_reopened(redis, local_store, prefix=names.prefix, uid=run.log.uid, owner="o")
    await close(run, FEW_STEPS, 1, number=1)
    before = await violations(run, offline=True)
    assert "SEAL_CHAIN_MISMATCH" not in before
    way(run, names.seal(0), [names.seal(0), names.seal(1)])
    assert "SEAL_CHAIN_MISMATCH" in await violations(run, offline=True)


# What comes after the seal of a run that failed.


async def test_behind_the_seal_of_a_failed_run_only_what_was_in_hand_is_a_note(failed: Recorded) -> None:
    """What its trainer may still write, and what a reopening that died has written."""
    run, store, names = failed, failed.store, failed.names
    assert await violations(run, offline=True) == set()
    manifest = store.get(names.policy_manifest(0, FEW_STEPS))
    for key in (
        names.policy_manifest(0, FEW_STEPS + 1),  # of a batch that was never committed
        names.policy(0, 1) + "e00000001-ffff/more.bin",  # of a version that the seal names
        names.policy_manifest(1, FEW_STEPS),
        names.checkpoint_manifest(FEW_STEPS + 1),
        names.checkpoint_manifest(0),  # older than the newest
        names.token_log(FEW_STEPS, 0),
        names.root + "policy-files/e9-abcdef012345/config.json",  # of a trainer that there never was
        names.intent(1),
        names.epoch("orchestrator", 2),
    ):
        assert store.create(key, manifest)
        found = [
            each.message for each in (await audit(run, offline=True)).violations if each.check.endswith("_UNNAMED")
        ]
        assert any(key in message for message in found), key
        store.delete(key)
    closing = find_closing(store, names)
    assert closing is not None
    intent = await write_intent(store, names, "reopen", {"request_id": "", "closing_sha256": closing.sha256})
    await create_epoch(store, names, "orchestrator", "o")
    in_hand = [
        names.checkpoint(FEW_STEPS) + "e00000001-abcd/rank-00000.bin",
        names.token_log(FEW_STEPS - 1, 0),
        names.root + "policy-files/e1-abcdef012345/config.json",
    ]
    for key in in_hand:
        assert store.create(key, b"x")
    report = await audit(run, offline=True)
    assert not [each for each in report.violations if each.check.endswith("_UNNAMED")]
    notes = [each.message for each in report.notes if each.check == "WRITTEN_BEHIND_SEAL"]
    assert all(any(key in note for note in notes) for key in [*in_hand, names.intent(intent.sequence)])


async def test_what_is_made_up_behind_the_seal_of_a_failed_run_is_found(failed: Recorded) -> None:
    for kind in KINDS:
        if kind in (RUN_JSON, SCORES):
            continue
        key = add(failed, kind)
        # Part of the next checkpoint was in hand; a trainer may take an epoch while the seal is written; what is in
        # quarantine is read by a deep audit.
        is_passed = kind in (CHECKPOINT_OBJECT, EPOCH, QUARANTINED)
        assert is_passed == (not await violations(failed, offline=True)), kind.name
        failed.store.delete(key)
