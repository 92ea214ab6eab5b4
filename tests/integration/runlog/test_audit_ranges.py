"""Contents of steps that are read in ranges: the same findings as one after the other, whoever reads them."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from millrace.errors import NotFoundError, UnavailableError
from millrace.processes.channel import HelperProcess
from millrace.readers.audit import AuditRanges, audit_run
from millrace.readers.audit import ranges as audit_ranges
from millrace.readers.audit.process import audit_beside
from millrace.readers.audit.ranges import KeptAnswers
from millrace.runlog import new_uid
from millrace_testing.full_disk import largest_file
from millrace_testing.patience import patient
from millrace_testing.polling import until
from millrace_testing.runlog.recorded_log import (
    append_rollout,
    audit,
    flip,
    rearchive,
    record,
    rewrite,
    rollout,
)
from millrace_testing.runlog.scene import findings

STEPS = 9
RANGE = 3


@pytest.fixture
async def run(log, redis, local_store):
    return await record(log, redis, local_store, steps=STEPS)


def plan(run, **changes) -> AuditRanges:
    store_url = run.store.uri("x").removesuffix("/x")
    return AuditRanges(**{"store_url": store_url, "range_steps": RANGE, "least_steps": 1, **changes})


async def ranged(run, *, offline: bool = True, **changes):
    redis = None if offline else run.redis
    names = run.names
    return await audit_run(redis, run.store, prefix=names.prefix, uid=names.uid, ranges=plan(run, **changes))


def chunk_at_borders(run) -> None:
    for step in (RANGE - 1, RANGE):
        flip(run, run.header(step).chunks[0].key)


def archive_behind_a_border(run) -> None:
    run.store.delete(run.header(RANGE).rollouts_key)


def archive_is_damaged(run) -> None:
    flip(run, run.header(2 * RANGE - 1).rollouts_key)


def header_before_a_border(run) -> None:
    run.store.delete(run.names.batch_header(RANGE - 1))


def header_at_a_border(run) -> None:
    flip(run, run.names.batch_header(RANGE))


def resolved_again_behind_a_border(run) -> None:
    earlier = run.header(RANGE - 1).resolutions[0]
    rewrite(run, RANGE, lambda header: header.resolutions.add().CopyFrom(earlier))


def member_is_not_archived(run) -> None:
    rearchive(run, RANGE, lambda rollouts: rollouts[1:])


DAMAGES = [
    chunk_at_borders,
    archive_behind_a_border,
    archive_is_damaged,
    header_before_a_border,
    header_at_a_border,
    resolved_again_behind_a_border,
    member_is_not_archived,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
async def test_ranges_find_what_a_serial_audit_finds(run, damage):
    damage(run)
    serial = await audit(run, offline=True)
    assert serial.violations
    assert findings(await ranged(run)) == findings(serial)


async def test_processes_find_what_a_serial_audit_finds(run):
    for damage in DAMAGES[:3]:
        damage(run)
    serial = await audit(run)
    assert {each.check for each in serial.violations} >= {"CHUNK_CORRUPT", "ARCHIVE_MISSING", "ARCHIVE_CORRUPT"}
    assert findings(await ranged(run, offline=False, jobs=2)) == findings(serial)


async def test_a_rollout_in_redis_that_was_generated_again_is_found_in_a_range(run):
    first = run.header(RANGE).samples[0]
    again = rollout(
        run.names.uid, ordinal=first.ordinal, member=first.member, attempt=7, dispatched_after="9999999999999-0"
    )
    await append_rollout(run, again)
    serial = await audit(run)
    assert "ROLLOUT_REGENERATED" in {each.check for each in serial.violations}
    assert findings(await ranged(run, offline=False)) == findings(serial)


# An audit that is killed.


class Killed(Exception):
    """Stands for the end of the process."""


async def test_a_killed_audit_goes_on_where_it_was_and_a_complete_one_leaves_nothing(run, tmp_path, monkeypatch):
    resume, asked = tmp_path / "audit.jsonl", list[int]()

    def counted(audit, question):
        asked.append(len(question["steps"]))
        if is_killed and len(asked) > 2:
            raise Killed
        return answer_steps(audit, question)

    is_killed, answer_steps = True, audit_ranges.answer_steps
    monkeypatch.setattr(audit_ranges, "answer_steps", counted)
    with pytest.raises(Killed):
        await ranged(run, resume=resume)
    is_killed, kept = False, resume.read_bytes()
    asked.clear()
    assert resume.stat().st_mode & 0o077 == 0
    resume.write_bytes(kept + b'\n{"question": "torn')
    report = await ranged(run, resume=resume)
    assert asked == [RANGE, 1], "two ranges were kept, and the others are read"
    told = [each.message for each in report.notes if each.check == "RESUMED"]
    assert len(told) == 1 and told[0].startswith("the contents of 2 ranges of steps were read by an audit that began")
    del report.notes[[each.check for each in report.notes].index("RESUMED")]
    assert findings(report) == findings(await audit(run, offline=True))
    assert not resume.exists()


async def test_what_was_kept_of_another_run_or_other_headers_is_read_again(run, tmp_path):
    resume = tmp_path / "audit.jsonl"
    KeptAnswers(resume, {"store_url": "file:///elsewhere", "prefix": "p", "uid": "u"}).close()
    assert "RESUMED" not in {each.check for each in (await ranged(run, resume=resume)).notes}
    kept = KeptAnswers(resume, {"store_url": plan(run).store_url, "prefix": run.names.prefix, "uid": run.names.uid})
    kept.add("ab" * 32, {"found": [], "chunks": 1, "rollouts": 1, "duplicates": 0})
    kept.close()
    assert "RESUMED" not in {each.check for each in (await ranged(run, resume=resume)).notes}


async def test_a_file_of_somebody_else_is_left_as_it_is(run, tmp_path):
    resume = tmp_path / "notes.txt"
    resume.write_text("the only copy of something\n")
    with pytest.raises(UnavailableError, match=r"notes\.txt is no file of an audit's answers, and is left as it is"):
        await ranged(run, resume=resume)
    assert resume.read_text() == "the only copy of something\n"


async def test_a_file_that_cannot_be_opened_is_named(run, tmp_path):
    with pytest.raises(UnavailableError, match=r"nowhere/audit\.jsonl, which is to keep what the audit has read"):
        await ranged(run, resume=tmp_path / "nowhere" / "audit.jsonl")


async def test_a_disk_that_is_full_is_named_and_what_was_kept_before_counts(run, tmp_path, monkeypatch):
    resume, add = tmp_path / "audit.jsonl", KeptAnswers.add

    def add_to_a_full_disk(kept: KeptAnswers, sha256: str, answer) -> None:
        with largest_file(resume.stat().st_size + 40 if b"question" in resume.read_bytes() else 1 << 20):
            add(kept, sha256, answer)

    monkeypatch.setattr(KeptAnswers, "add", add_to_a_full_disk)
    with pytest.raises(UnavailableError, match=r"cannot write .*audit\.jsonl: File too large"):
        await ranged(run, resume=resume)
    monkeypatch.undo()
    report = await ranged(run, resume=resume)
    told = [each.message for each in report.notes if each.check == "RESUMED"]
    assert len(told) == 1 and told[0].startswith("the contents of 1 ranges of steps were read")


async def test_a_range_that_ends_with_a_timeout_ends_the_audit(run, monkeypatch):
    def time_out(audit, question):
        raise TimeoutError(110, "Connection timed out")

    monkeypatch.setattr(audit_ranges, "answer_steps", time_out)
    with pytest.raises(TimeoutError, match="Connection timed out"):
        await asyncio.wait_for(ranged(run), 60)


async def test_a_process_that_is_killed_is_replaced_and_one_that_dies_again_ends_the_audit(run, monkeypatch):
    started = list[HelperProcess]()

    def start(deaths: int):
        def start_helper() -> HelperProcess:
            started.append(helper := begin())
            if len(started) <= deaths:
                os.kill(helper.pid, signal.SIGKILL)
            return helper

        return start_helper

    begin = audit_ranges.start_helper
    monkeypatch.setattr(audit_ranges, "start_helper", start(1))
    monkeypatch.setattr(audit_ranges.AuditRanges, "jobs_for", lambda plan, steps: 2)
    assert findings(await ranged(run)) == findings(await audit(run, offline=True))
    started.clear()
    monkeypatch.setattr(audit_ranges, "start_helper", start(99))
    with pytest.raises(UnavailableError, match=r"died 2 times over the same steps: signal SIGKILL"):
        await ranged(run)
    for helper in started:
        _wait_gone(helper.pid)


def _wait_gone(pid: int) -> None:
    ends = time.monotonic() + patient(5)
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < ends, f"process {pid} lives on"
        time.sleep(0.02)


# Beside an orchestrator.


async def test_an_audit_beside_an_orchestrator_is_the_same_and_raises_the_same(run, redis_url):
    flip(run, run.header(1).chunks[0].key)
    place = {"redis_url": redis_url, "store_url": plan(run).store_url, "prefix": run.names.prefix}
    report = await audit_beside(uid=run.names.uid, on_progress=lambda text: None, **place)
    assert findings(report) == findings(await audit(run))
    with pytest.raises(NotFoundError, match="there is no run"):
        await audit_beside(uid=new_uid(), on_progress=lambda text: None, **place)


async def test_an_audit_that_is_cancelled_while_its_process_starts_leaves_none(run, redis_url, monkeypatch):
    started, may_start, begun = list[HelperProcess](), threading.Event(), threading.Event()
    start = HelperProcess.start.__func__

    def start_late(cls, module, *, env):
        begun.set()
        assert may_start.wait(30)
        started.append(start(cls, module, env=env))
        return started[0]

    monkeypatch.setattr(HelperProcess, "start", classmethod(start_late))
    place = {"redis_url": redis_url, "store_url": plan(run).store_url, "prefix": run.names.prefix}
    auditing = asyncio.create_task(audit_beside(uid=run.names.uid, on_progress=lambda text: None, **place))
    assert await asyncio.to_thread(begun.wait, 30)
    auditing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await auditing
    may_start.set()
    await until(lambda: bool(started) and not is_alive(started[0].pid), what="the end of the process")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
