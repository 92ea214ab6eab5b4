"""Retention on a recorded run: what goes, that a record says so first, and what an audit makes of it."""

import pytest

from millrace.errors import NotFoundError
from millrace.readers.repair import RepairState, repair_run
from millrace.runlog import catalogue
from millrace.runlog.catalogue import KeptAs
from millrace.runlog.records.retirement import RETIRED, newest_retirement
from millrace.runlog.records.revisions import read_chunk, read_rollouts
from millrace.storage.local import LocalStore
from millrace_testing.runlog.scene import Scene, objects, read_header, record_scene


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, redis_url) -> Scene:
    return record_scene(tmp_path_factory.mktemp("retired"), redis_url)


@pytest.fixture
def scene(recorded):
    yield recorded
    recorded.store.undo()


def test_what_is_retired_is_gone_and_the_audit_is_clean_and_says_so(scene):
    record = newest_retirement(scene.store, scene.names)
    assert record is not None and record.number == 2
    assert record.of(KeptAs.BATCHES).below == 5
    for depth in ("fast", "deep"):
        report = scene.audit(depth)
        assert list(report.violations) == []
        told = [each.message for each in report.notes if each.check == "RETIRED"]
        assert len(told) == 4 and all("retirements/0000000" in each for each in told)
        assert "steps 0 to 4" in told[0] and "as orchestrator.retain_batches = 2 says" in told[0]
    gone = {kind.name for kind in catalogue.KINDS if kind.kept in (KeptAs.BATCHES, KeptAs.POLICIES)}
    for kind, keys in objects(scene.store, scene.names).items():
        if kind.name in gone:
            places = [kind.parse(key.removeprefix(scene.names.root)) or {} for key in keys]
            assert all(not record.of(kind.kept).covers(place) for place in places), kind.name


def test_what_is_missing_and_was_not_retired_is_a_violation(scene):
    scene.store.delete(read_header(scene.store, scene.names, 5).rollouts_key)
    assert [each.check for each in scene.audit("fast").violations] == ["ARCHIVE_MISSING"]


def test_who_reads_what_was_retired_is_told_by_which_record(scene):
    header = read_header(scene.store, scene.names, 3)
    for read in (lambda: read_chunk(scene.store, header, 0), lambda: read_rollouts(scene.store, header)):
        with pytest.raises(NotFoundError) as caught:
            read()
        assert caught.value.reason == RETIRED
        assert "of step 3 of run" in caught.value.message and "retirements/00000002.json" in caught.value.message
        assert "steps from 5 on" in (caught.value.remedy or "")


async def test_a_repair_restores_nothing_that_was_retired(scene, tmp_path):
    (found,) = await repair_run(None, scene.store, scene.names, backup=LocalStore(tmp_path))
    assert found.state is RepairState.NOT_NEEDED and "retired" in found.detail
