"""The audit finds each damage under its name, and nothing in a run that is whole."""

import dataclasses

import pytest

from millrace.errors import NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.readers.audit import audit_run
from millrace.rollouts.wire import decode_archive
from millrace.runlog import chain_hash, commit_batch, new_uid
from millrace_testing.runlog.recorded_log import (
    MEMBERS,
    NUM_EVENTS,
    STEPS,
    append_rollout,
    audit,
    flip,
    rearchive,
    record,
    rewrite,
    rollout,
    seal_anew,
    violations,
)


@pytest.fixture
async def run(log, redis, local_store):
    return await record(log, redis, local_store)


async def test_a_whole_run_is_clean_and_counted(run):
    report = await audit(run)
    assert list(report.violations) == []
    assert (report.run, report.run_uid) == ("runs/demo", run.names.uid)
    assert report.is_closed and report.num_steps == STEPS and report.first_step == 0
    assert report.num_trained == 2 * STEPS and report.num_open == 0
    assert dict(report.dropped) == {"zero_advantage": STEPS, "run_ended": 1}
    assert report.num_duplicates == STEPS
    assert report.num_rollouts == 2 * MEMBERS * STEPS
    assert (report.num_policies, report.num_lineages) == (STEPS + 1, 1)
    assert (report.num_events, report.num_writers) == (NUM_EVENTS, 2)
    assert report.num_generations == 1 and dict(report.epochs) == {"orchestrator": 1, "trainer": 1, "log": 1}
    assert report.chain_hash == run.chain.hex()
    assert {note.check for note in report.notes} == {"CHUNKS_VERIFIED"}


async def test_a_run_that_goes_on_is_clean(log, redis, local_store):
    report = await audit(await record(log, redis, local_store, closes=False))
    assert list(report.violations) == [] and not report.is_closed


async def test_a_run_whose_rollouts_lie_in_the_spool_only_is_not_called_seen(log, redis, local_store):
    """What an env-server holds is in no store: the audit says that it did not see it, and why."""
    run = await record(log, redis, local_store, closes=False, steps=0, checkpoints=())
    report = await audit(run)
    assert list(report.violations) == [] and (report.num_steps, report.num_rollouts) == (0, 0)
    (unseen,) = [each.message for each in report.not_seen if each.check == "SPOOLS"]
    assert "spools of its env-servers" in unseen and "were not seen" in unseen
    assert "NOTHING_RESOLVED" not in {each.check for each in report.not_seen}, "it may still come"


async def test_a_closed_run_that_resolved_nothing_is_not_called_seen(log, redis, local_store):
    """Its rollouts may have been played, and lost with the spool: nothing in the log says that there were any."""
    run = await record(log, redis, local_store, closes=False, steps=0, checkpoints=())
    epoch = await log.acquire_epoch("orchestrator", "o")
    header = batch_pb2.BatchHeader(
        run_uid=log.uid,
        run_hash=log.run_hash,
        kind=batch_pb2.BATCH_KIND_CLOSE,
        outcome=batch_pb2.RUN_OUTCOME_CANCELLED,
        previous_chain_hash=run.chain,
    )
    await commit_batch(log, epoch, header, [], b"")
    report = await audit(run, offline=True)
    unseen = {each.check: each.message for each in report.not_seen}
    assert "no header resolves an ordinal" in unseen["NOTHING_RESOLVED"] and "SPOOLS" not in unseen
    assert report.is_closed and (report.num_trained, dict(report.dropped)) == (0, {})


async def test_the_store_alone_is_enough(run):
    await run.redis.delete(*run.names.all_keys)
    assert list((await audit(run, offline=True)).violations) == []
    report = await audit(run)
    assert list(report.violations) == [] and "NOT_IN_REDIS" in {each.check for each in report.not_seen}


async def test_a_run_that_does_not_exist(run):
    with pytest.raises(NotFoundError, match="there is no run"):
        await audit_run(None, run.store, prefix=run.names.prefix, uid=new_uid())


async def test_every_violation_is_found_at_once(run):
    run.store.delete(run.names.batch_header(1))
    flip(run, run.header(2).chunks[0].key)
    run.store.delete(run.names.policy_manifest(0, 2))
    assert {"HEADER_MISSING", "CHUNK_CORRUPT", "POLICY_MISSING"} <= await violations(run, offline=True)


# Headers and ordinals.


async def test_a_missing_header(run):
    run.store.delete(run.names.batch_header(1))
    assert await violations(run, offline=True) == {"HEADER_MISSING"}
    assert await violations(run) == {"HEADER_MISSING", "MIRROR_AHEAD"}


async def test_a_replaced_header_breaks_the_chain(run):
    header = run.header(1)
    header.reward_mean = 0.75
    run.store.put(run.names.batch_header(1), header.SerializeToString(deterministic=True))
    found = {"CHAIN_BROKEN", "EVENT_CHAIN_MISMATCH"}
    assert await violations(run, offline=True) == found
    assert await violations(run) == found | {"MIRROR_DIFFERS"}


async def test_a_header_that_does_not_decode_is_no_traceback(run):
    run.store.put(run.names.batch_header(1), b"\xff\xff\xff")
    found = await violations(run, offline=True)
    assert found == {"HEADER_CORRUPT", "HEADER_MISSING", "CHAIN_BROKEN"}, "events tell of a step that cannot be read"


async def test_a_header_behind_the_closing_one(run):
    data = run.store.get(run.names.batch_header(STEPS))
    header = batch_pb2.BatchHeader(
        run_uid=run.names.uid,
        kind=batch_pb2.BATCH_KIND_CLOSE,
        step=STEPS + 1,
        run_hash=run.log.run_hash,
        previous_chain_hash=chain_hash(run.header(STEPS).previous_chain_hash, data),
        writer_epoch=1,
        resolved_below=3 * STEPS + 1,
        final_version=STEPS,
        outcome=batch_pb2.RUN_OUTCOME_SUCCEEDED,
    )
    run.store.put(run.names.batch_header(STEPS + 1), header.SerializeToString())
    assert await violations(run) == {"HEADER_BEHIND_CLOSING"}


@pytest.mark.parametrize(
    ("field", "value", "check"),
    [
        ("run_uid", "another", "HEADER_OF_OTHER_RUN"),
        ("run_hash", "cd" * 32, "RUN_HASH_MISMATCH"),
        ("step", 7, "HEADER_STEP_WRONG"),
        ("orchestrator_state", b"{", "STATE_CORRUPT"),
        ("rollouts_key", "", "ARCHIVE_MISSING"),
        ("writer_epoch", 9, "WRITER_EPOCH_UNKNOWN"),
    ],
)
async def test_wrong_fields_of_a_header(run, field, value, check):
    rewrite(run, 1, lambda header: setattr(header, field, value))
    found = await violations(run, offline=True)
    # An epoch that nobody took is also ahead of those of the headers behind it.
    follows = {"OBJECT_UNNAMED"} if field == "rollouts_key" else set()
    assert found - {"WRITER_EPOCH_BACK"} == {check, *follows}


async def test_a_fenced_writer_that_got_through(run):
    await run.log.acquire_epoch("orchestrator", "o2")
    seal_anew(run)
    rewrite(run, 0, lambda header: setattr(header, "writer_epoch", 2))
    assert await violations(run, offline=True) == {"WRITER_EPOCH_BACK"}


async def test_an_ordinal_that_is_resolved_twice(run):
    def again(header: batch_pb2.BatchHeader) -> None:
        header.resolutions.append(run.header(0).resolutions[0])

    rewrite(run, 2, again)
    assert await violations(run, offline=True) == {"ORDINAL_RESOLVED_TWICE"}


async def test_an_ordinal_that_no_header_resolves(run):
    def forget(header: batch_pb2.BatchHeader) -> None:
        del header.resolutions[2]

    rewrite(run, 1, forget)
    report = await audit(run, offline=True)
    assert [(finding.check, "ordinals 5 " in finding.message) for finding in report.violations] == [
        ("ORDINAL_LOST", True)
    ]


async def test_a_frontier_that_lacks_what_was_resolved(run):
    def lower(header: batch_pb2.BatchHeader) -> None:
        header.resolved_below = 4

    rewrite(run, 1, lower)
    # The next header says that 4 and 5 are resolved: believed from this one on, nobody resolved them.
    assert await violations(run, offline=True) == {"FRONTIER_LACKS_ORDINALS", "ORDINAL_LOST"}


async def test_a_frontier_that_contradicts_itself(run):
    rewrite(run, 1, lambda header: header.resolved_above.append(0))
    assert await violations(run, offline=True) == {"FRONTIER_CORRUPT"}


async def test_an_ordinal_that_stays_open_behind_the_closing_header(run):
    def skip(header: batch_pb2.BatchHeader) -> None:
        header.resolutions[0].ordinal = 3 * STEPS + 2
        header.resolved_below = 3 * STEPS
        header.resolved_above.append(3 * STEPS + 2)

    rewrite(run, STEPS, skip)
    report = await audit(run, offline=True)
    assert [finding.check for finding in report.violations] == ["OPEN_AFTER_CLOSE"] and report.num_open == 2


async def test_a_drop_without_a_reason_and_a_resolution_without_outcome(run):
    def blank(header: batch_pb2.BatchHeader) -> None:
        header.resolutions[2].reason = ""

    rewrite(run, 1, blank)
    assert await violations(run, offline=True) == {"DROPPED_WITHOUT_REASON"}
    rewrite(run, 1, lambda header: setattr(header.resolutions[2], "outcome", 0))
    assert await violations(run, offline=True) == {"ORDINAL_WITHOUT_OUTCOME"}


async def test_a_closing_header_trains_nothing(run):
    def train(header: batch_pb2.BatchHeader) -> None:
        header.resolutions[0].outcome = batch_pb2.ORDINAL_OUTCOME_TRAINED

    rewrite(run, STEPS, train)
    assert "TRAINED_BY_CLOSING_HEADER" in await violations(run, offline=True)


async def test_a_closing_header_with_another_final_version(run):
    rewrite(run, STEPS, lambda header: setattr(header, "final_version", STEPS - 1))
    assert await violations(run, offline=True) == {"FINAL_VERSION_WRONG"}


# Samples, chunks, archives.


async def test_a_sample_of_an_ordinal_that_was_dropped(run):
    def stray(header: batch_pb2.BatchHeader) -> None:
        header.samples[0].ordinal = 5

    rewrite(run, 1, stray)
    assert await violations(run, offline=True) == {"SAMPLE_NOT_TRAINED", "TRAINED_NOT_ARCHIVED"}


async def test_a_trained_ordinal_without_a_sample(run):
    def train(header: batch_pb2.BatchHeader) -> None:
        header.resolutions[2].outcome = batch_pb2.ORDINAL_OUTCOME_TRAINED

    rewrite(run, 1, train)
    assert await violations(run, offline=True) == {"TRAINED_WITHOUT_SAMPLE"}


async def test_a_member_that_is_trained_twice(run):
    rewrite(run, 1, lambda header: setattr(header.samples[1], "member", 0))
    assert await violations(run, offline=True) == {"SAMPLE_TRAINED_TWICE"}

    def attempts(header: batch_pb2.BatchHeader) -> None:
        header.samples[1].attempt = 1

    rewrite(run, 1, attempts)
    assert "MEMBER_TRAINED_TWICE" in await violations(run, offline=True)


async def test_chunks(run):
    flip(run, run.header(2).chunks[1].key)
    report = await audit(run)
    assert [finding.check for finding in report.violations] == ["CHUNK_CORRUPT"]
    assert run.store.uri(run.header(2).chunks[1].key) in report.violations[0].message
    run.store.delete(run.header(2).chunks[1].key)
    assert await violations(run) == {"CHUNK_MISSING"}


async def test_chunks_below_the_oldest_kept_checkpoint_are_missing_unless_they_were_retired(run):
    run.store.delete(run.header(0).chunks[0].key)
    assert await violations(run) == {"CHUNK_MISSING"}


async def test_archives(run):
    key = run.header(1).rollouts_key
    flip(run, key)
    assert await violations(run) == {"ARCHIVE_CORRUPT"}
    run.store.delete(key)
    assert await violations(run) == {"ARCHIVE_MISSING"}


async def test_what_was_trained_is_archived(run):
    rearchive(run, 1, lambda played: played[1:])
    assert await violations(run, offline=True) == {"TRAINED_NOT_ARCHIVED", "GROUP_NOT_WHOLE"}


async def test_a_group_is_trained_with_each_of_its_members_once(run):
    rearchive(run, 1, lambda played: [dataclasses.replace(played[0], group_size=MEMBERS + 1), *played[1:]])
    rearchive(run, 2, lambda played: [*played, dataclasses.replace(played[0], attempt=1, entry_id="9-0")])
    report = await audit(run, offline=True)
    assert [found.check for found in report.violations] == ["GROUP_NOT_WHOLE"] * 2
    assert "ordinal 6 with the members [0, 0, 1]" in report.violations[1].message


async def test_a_rollout_of_an_ordinal_that_its_archive_does_not_resolve(run):
    rearchive(run, 1, lambda played: [*played, rollout(run.names.uid, ordinal=0, member=0)])
    assert await violations(run, offline=True) == {"ARCHIVE_STRANGER"}


async def test_a_rollout_that_was_generated_again(run):
    def again(played):
        first = played[0]
        return [
            *played,
            dataclasses.replace(
                first, attempt=1, dispatched_after=first.entry_id, entry_id="9" * 13 + "-0", is_duplicate=True
            ),
        ]

    rearchive(run, 1, again)
    assert await violations(run, offline=True) == {"ROLLOUT_REGENERATED"}


async def test_a_late_duplicate_is_counted_and_no_violation(run):
    def late(played):
        before = dataclasses.replace(played[0], entry_id="9" * 13 + "-0", is_duplicate=True)
        return [*played, before]  # it was asked for before the log held the other one

    for step in range(STEPS):
        rearchive(run, step, late)
        rewrite(run, step, lambda header: setattr(header, "orchestrator_state", b"{}"))
    report = await audit(run, offline=True)
    assert list(report.violations) == [] and report.num_duplicates == STEPS


async def test_groups_that_are_scored_whole_are_played_again_as_a_whole(run):
    def again(played):
        first = played[0]
        late = dataclasses.replace(
            first, attempt=1, dispatched_after=first.entry_id, entry_id="9" * 13 + "-0", is_duplicate=True
        )
        return [*played, late]

    rearchive(run, 1, again)
    rewrite(run, 1, lambda header: setattr(header, "orchestrator_state", b'{"scored_whole": ["e"]}'))
    assert await violations(run, offline=True) == set()


async def test_redis_proves_a_regeneration_of_what_is_resolved_and_of_what_is_open(run):
    entry = decode_archive(run.store.get(run.header(1).rollouts_key))[0].entry_id
    await append_rollout(run, rollout(run.names.uid, ordinal=3, member=0, attempt=1, dispatched_after=entry))
    assert await violations(run) == {"ROLLOUT_REGENERATED"}
    assert await violations(run, offline=True) == set()


async def test_redis_proves_a_regeneration_of_an_open_ordinal(log, redis, local_store):
    run = await record(log, redis, local_store, closes=False)
    entry = await append_rollout(run, rollout(log.uid, ordinal=50, member=0))
    assert await violations(run) == set()
    await append_rollout(run, rollout(log.uid, ordinal=50, member=0, attempt=1, dispatched_after=entry))
    assert await violations(run) == {"ROLLOUT_REGENERATED"}


async def test_duplicates_are_counted_over_takeovers(run):
    rewrite(run, 2, lambda header: setattr(header, "orchestrator_state", b'{"num_duplicates": 0}'))
    assert (await audit(run, offline=True)).num_duplicates == 1 + 0 + STEPS, "a new process begins at 0"
