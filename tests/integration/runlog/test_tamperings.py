"""Every kind of object of a run × every way to tamper with it: which audit finds it, under which name.

`fast` and `deep` read the store alone; `attested` is the fast audit with the key and the
attestation that was kept elsewhere, without which a history that was rewritten as a whole looks like a true one.
"""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from millrace.internal.v1 import batch_pb2
from millrace.readers.repair import RepairState, repair_run
from millrace.runlog.catalogue import ATTESTATION, SEAL, ObjectKind
from millrace.runlog.names import Deployment, Names
from millrace.storage.local import LocalStore
from millrace_testing.runlog.recorded_log import flip
from millrace_testing.runlog.scene import (
    PREFIX,
    STEPS,
    Scene,
    last,
    objects,
    read_header,
    record_run,
    record_scene,
    rehash,
)
from millrace_testing.runlog.tamperings import (
    Way,
    expected_depth,
    flip_bit,
    is_finding,
    kinds,
    picks,
    put_another_runs,
    remove,
    rows,
    truncate,
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, redis_url) -> Scene:
    return record_scene(tmp_path_factory.mktemp("recorded"), redis_url)


@pytest.fixture(scope="module")
def untampered(recorded) -> dict[Path, bytes]:
    return recorded.files()


@pytest.fixture
def scene(recorded) -> Iterator[Scene]:
    yield recorded
    recorded.store.undo()


# What the issue names.


def _change_header(scene: Scene, step: int, edit: Callable[[batch_pb2.BatchHeader], None]) -> None:
    header = read_header(scene.store, scene.names, step)
    edit(header)
    scene.store.put(scene.names.batch_header(step), header.SerializeToString(deterministic=True))


def last_two_steps(scene: Scene) -> None:
    for step in (STEPS - 2, STEPS - 1, STEPS):
        scene.store.delete(scene.names.batch_header(step))


def outcome(scene: Scene) -> None:
    _change_header(scene, STEPS, lambda header: setattr(header, "outcome", batch_pb2.RUN_OUTCOME_FAILED))
    rehash(scene)


def state(scene: Scene) -> None:
    _change_header(scene, STEPS, lambda header: setattr(header, "orchestrator_state", b'{"num_duplicates": 999}'))
    rehash(scene)


def drop_reasons(scene: Scene) -> None:
    for step in range(STEPS):
        _change_header(scene, step, lambda header: setattr(header.resolutions[2], "reason", "stale"))
    rehash(scene)


def old_versions(scene: Scene) -> None:
    for version in range(4, 8):  # the oldest that retention keeps
        for info in list(scene.store.list(scene.names.policy(0, version))):
            if not info.key.endswith("manifest.json"):
                scene.store.delete(info.key)


def old_versions_whole(scene: Scene) -> None:
    for version in range(4):
        for info in list(scene.store.list(scene.names.policy(0, version))):
            scene.store.delete(info.key)


def another_digest(scene: Scene) -> None:
    key = scene.names.policy_manifest(0, 3)
    manifest = json.loads(scene.store.get(key))
    scene.store.put(key, json.dumps({**manifest, "digest": "ab" * 32}).encode())
    rehash(scene)


def another_versions_manifest(scene: Scene) -> None:
    scene.store.put(scene.names.policy_manifest(0, 3), scene.store.get(scene.names.policy_manifest(0, 4)))


def all_epochs(scene: Scene) -> None:
    for info in list(scene.store.list(scene.names.all_epochs)):
        scene.store.delete(info.key)


def all_checkpoints(scene: Scene) -> None:
    for info in list(scene.store.list(scene.names.checkpoints)):
        scene.store.delete(info.key)


def all_events(scene: Scene) -> None:
    for info in list(scene.store.list(scene.names.event_archive)):
        scene.store.delete(info.key)


def seal_and_last_events(scene: Scene) -> None:
    scene.store.delete(scene.names.seal(0))
    scene.store.delete(last(scene.store, scene.names.event_archive))


def _index(names: Names, name: str) -> list[str]:
    return [Deployment(PREFIX).name_object(name), Deployment(PREFIX).request_object(f"request-{name}")]


NAMED = {
    "the last two steps and the closing header deleted": last_two_steps,
    "outcome of the closing header changed, hashes redone": outcome,
    "state of the closing header changed, hashes redone": state,
    "drop reasons renamed, hashes redone": drop_reasons,
    "objects of the oldest versions deleted, the anchor among them": old_versions,
    "the oldest versions deleted whole": old_versions_whole,
    "a manifest with another digest, hashes redone": another_digest,
    "another version's manifest": another_versions_manifest,
    "all epochs deleted": all_epochs,
    "all checkpoints deleted": all_checkpoints,
    "all event archives deleted": all_events,
    "seal and last event archive deleted": seal_and_last_events,
}
INDEX_WAYS: dict[str, Callable[[Scene, str], None]] = {
    "deleted": lambda scene, key: scene.store.delete(key),
    "byte flipped": flip,
    "another's": lambda scene, key: scene.store.put(key, scene.other.uid.encode()),
}

CASES: dict[str, Callable[[Scene], None]] = {
    **{
        f"{kind}: {way}": lambda scene, place=place, tamper=tamper: tamper(scene, _index(scene.names, "demo")[place])
        for place, kind in enumerate(("name object", "request object"))
        for way, tamper in INDEX_WAYS.items()
    },
    **NAMED,
}


def test_redoing_the_hashes_of_an_untampered_run_changes_nothing(scene, untampered):
    rehash(scene)
    assert scene.files() == untampered


def test_the_untampered_run_is_clean(recorded):
    for how in ("fast", "deep", "attested"):
        report = recorded.audit(how)
        assert list(report.violations) == [], how
    assert report.num_attestations == 2, "the stored one and the kept one"
    assert recorded.audit("deep").num_bytes_verified > 10_000


def rows_by_default() -> Iterator[Any]:
    """Yield each row; of each kind all but one way are marked long, so that every way remains for some kind."""
    for number, (_, found) in enumerate(groupby(rows(), key=itemgetter(0))):
        ways = list(found)
        for place, (kind, way) in enumerate(ways):
            marks = () if place == number % len(ways) else pytest.mark.long
            yield pytest.param(kind, way, marks=marks, id=f"{kind.name}-{way.__name__}")


@pytest.mark.parametrize(("kind", "way"), rows_by_default())
def test_what_the_catalogue_declares_is_found_as_it_says(scene, kind: ObjectKind, way: Way) -> None:
    keys, tampered = objects(scene.store, scene.names)[kind], 0
    for key in picks(keys, way):
        before = scene.store.get(key)
        way(scene, key, keys)
        if way == put_another_runs and scene.store.get(key) == before:
            continue  # both runs have archived nothing in the end
        tampered += 1
        expected = expected_depth(kind, way, scene, key, before)
        how, checks = found_first(scene, is_attestation=kind == ATTESTATION)
        assert how == expected, key
        assert how == "nobody" or any(is_finding(kind, way, check) for check in checks), (key, checks)
        scene.store.undo()
    assert tampered


@pytest.mark.parametrize("way", [remove, truncate, flip_bit])
def test_a_replica_restores_what_the_catalogue_says(recorded, tmp_path, way: Way) -> None:
    """One object of each kind at a time: what proves the others is restored first."""
    replica, scene = recorded.copy(tmp_path / "replica"), recorded.copy(tmp_path / "damaged")
    found = {kind: keys for kind, keys in objects(scene.store, scene.names).items() if kind != SEAL}  # no later one
    hit = {kind: keys[len(keys) // 2] for kind, keys in found.items()}
    for kind, key in hit.items():
        way(scene, key, found[kind])
    repairs = asyncio.run(
        repair_run(None, LocalStore(scene.directory), scene.names, backup=replica.store, is_applied=True)
    )
    restored = {each.key for each in repairs if each.state is RepairState.RESTORED}
    assert {kind.name for kind, key in hit.items() if key in restored} == {kind.name for kind in hit if kind.repair}
    assert all(scene.store.get(key) == replica.store.get(key) for kind, key in hit.items() if kind.repair)
    told = {each.key for each in repairs if each.state is RepairState.REFUSED}
    assert hit[ATTESTATION] in told or way != truncate, "it can be read, or nobody knows that there was one"


@pytest.mark.parametrize("case", CASES)
def test_a_tampering_is_found(scene, untampered, case):
    CASES[case](scene)
    assert scene.files() != untampered, "nothing was tampered"
    assert found_first(scene)[0] == "fast"


def found_first(scene: Scene, *, is_attestation: bool = False) -> tuple[str, set[str]]:
    """Return the audit that finds something first, and the names of what it finds."""
    attestation = scene.names.attestation(1)
    if not is_attestation:  # it would tell of most tamperings by itself
        scene.store.delete(attestation)
    for how in ("fast", "deep", "attested"):
        if how == "attested" and not is_attestation:
            scene.store.put(attestation, scene.kept.encode())
        if checks := {found.check for found in scene.audit(how).violations}:
            return how, checks
    return "nobody", set()


def test_a_history_that_was_rewritten_as_a_whole_is_found_with_an_attestation_only(recorded, tmp_path, redis_url):
    store = LocalStore(tmp_path / "rewritten")
    asyncio.run(record_run(store, redis_url, "demo", recorded.names.uid, seed=7))
    forged = Scene(
        directory=tmp_path / "rewritten",
        names=recorded.names,
        other=recorded.other,
        key=recorded.key,
        kept=recorded.kept,
    )
    for how in ("fast", "deep"):
        report = forged.audit(how)
        assert list(report.violations) == [] and "NO_ATTESTATION" in {each.check for each in report.not_seen}
    checks = {found.check for found in forged.audit("attested").violations}
    assert checks == {"ATTESTATION_MISMATCH", "ATTESTATION_MISSING"}
    attestation = recorded.names.attestation(1)
    forged.store.put(attestation, recorded.store.get(attestation))  # one that is left in the store is enough
    assert {found.check for found in forged.audit("fast").violations} == {"ATTESTATION_MISMATCH"}


@pytest.mark.long
def test_no_damage_is_a_traceback(recorded, tmp_path):
    """Random bytes, cuts, and documents of another shape in the place of any object."""
    rng = random.Random(5)
    junk = [b"", b"\0", b"{}", b"[]", b"null", b'{"format": 1}', b"\xff" * 40, b'{"a":' * 3000, b"9" * 5000]
    scene = recorded.copy(tmp_path / "store")
    for key in [key for keys in objects(scene.store, scene.names).values() for key in (keys[0], keys[-1])]:
        whole = scene.store.get(key)
        for data in (
            rng.choice(junk),
            rng.randbytes(rng.randrange(1, 300)),
            whole[: len(whole) // 2],
            _misshapen(whole),
        ):
            if data == whole:
                continue
            scene.store.put(key, data)
            report = scene.audit("deep")
            assert list(report.violations), f"{key} holding {data[:40]!r}"
        scene.store.put(key, whole)
    assert list(scene.audit("deep").violations) == []


def _misshapen(data: bytes) -> bytes:
    """Return a JSON document whose values are of other types."""
    try:
        document = json.loads(data)
        return json.dumps({name: [{"x": -1}] for name in document}).encode()
    except (ValueError, TypeError):
        return data + data


def test_the_recorded_run_has_every_kind_but_those_of_runs_that_went_wrong(recorded):
    assert objects(recorded.store, recorded.names).keys() == {*kinds()}
