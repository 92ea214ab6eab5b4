"""Objects that are larger than anything of their name: each reader refuses them by their size, and reads nothing."""

import os
import tracemalloc
from pathlib import Path

import pytest

from millrace.errors import CorruptObjectError
from millrace.orchestrator.catalog import RunCatalog
from millrace.policies.fetch import read_manifest
from millrace.readers.repair import repair_run
from millrace.runlog import index
from millrace.runlog.event_archive import load_archived_events
from millrace.runlog.names import Deployment
from millrace.runlog.records import numbered
from millrace.runlog.records.numbered import epoch_owner
from millrace.runlog.records.revisions import load_reopenings, load_step, read_chunk
from millrace.runlog.records.run_record import load_origin
from millrace_testing.runlog.recorded_log import audit, record

LARGE_BYTES = 200 << 20
"""More than any small object has; sparse, so that it costs no disk."""
MOST_BYTES = 16 << 20
"""What a reader may take for one that it refuses."""


@pytest.fixture
async def run(log, redis, local_store):
    return await record(log, redis, local_store)


def inflate(store, key: str, size_bytes: int = LARGE_BYTES) -> None:
    """Make an object as large as only a hostile one is."""
    if store.head(key) is None:
        store.put(key, b"{}")
    os.truncate(Path(store.uri(key).removeprefix("file://")), size_bytes)


def archives(run) -> list[str]:
    return [info.key for info in run.store.list(run.names.event_archive)]


KEYS = {
    "run.json": lambda run: run.names.run_json,
    "header": lambda run: run.names.batch_header(1),
    "chunk": lambda run: run.header(1).chunks[0].key,
    "reopening": lambda run: run.names.reopened(1),
    "intent": lambda run: run.names.intent(1),
    "event archive": lambda run: archives(run)[0],
    "policy manifest": lambda run: run.names.policy_manifest(0, 1),
    "name": lambda run: Deployment(run.names.prefix).name_object("large"),
}
READ = {
    "run.json": lambda run, header: load_origin(run.store, run.names),
    "header": lambda run, header: load_step(run.store, run.names, 1),
    "chunk": lambda run, header: read_chunk(run.store, header, 0),
    "reopening": lambda run, header: load_reopenings(run.store, run.names),
    "intent": lambda run, header: numbered.load_intents(run.store, run.names, 0),
    "event archive": lambda run, header: load_archived_events(run.store, run.names),
    "policy manifest": lambda run, header: read_manifest(run.store, run.names.policy_manifest(0, 1)),
    "name": lambda run, header: index.read_uid(run.store, KEYS["name"](run)),
}


@pytest.mark.parametrize("kind", KEYS)
async def test_nothing_of_it_is_read(run, kind):
    key, header = KEYS[kind](run), run.header(1)
    inflate(run.store, key)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptObjectError) as refused:
            READ[kind](run, header)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    assert run.store.uri(key) in refused.value.message and str(LARGE_BYTES) in refused.value.message


async def test_who_took_an_epoch_is_not_known(run):
    key = run.names.epoch("trainer", 9)
    inflate(run.store, key)
    assert epoch_owner(run.store, run.names, "trainer", 9) == ""


async def test_the_run_is_damaged_and_named(run):
    inflate(run.store, run.names.run_json)
    catalog = RunCatalog(redis=run.redis, store=run.store, prefix=run.names.prefix, owner="test")
    view = await catalog.look_at(run.names.uid, "run", is_looked_at=True)
    assert view.damage is not None and view.damage.reason == "OBJECT_TOO_LARGE"
    assert run.store.uri(run.names.run_json) in view.run.error.message


async def test_a_repair_says_that_it_is_there(run):
    key = run.header(1).rollouts_key
    inflate(run.store, key, 2 << 30)
    [repair] = [each for each in await repair_run(None, run.store, run.names) if each.key == key]
    assert str(2 << 30) in repair.problem, repair


@pytest.mark.parametrize("kind", ["run.json", "header", "chunk", "event archive", "policy manifest"])
async def test_an_audit_and_a_repair_tell_of_it(run, kind):
    key = KEYS[kind](run)
    inflate(run.store, key)
    report = await audit(run, offline=True)
    told = [finding.message for finding in report.violations]
    assert any(run.store.uri(key) in message for message in told), told
    repairs = await repair_run(run.log, run.store, run.names)
    problems = [repair.problem for repair in repairs if repair.key == key]
    assert len(problems) == 1 and "missing" not in problems[0], problems
