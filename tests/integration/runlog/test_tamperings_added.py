"""What is added to a run that is sealed and attested: the deep audit names it, and exports do not read it.

And what a single object may say: keys that lead elsewhere, in whatever names one, are that object's violation and leave
the rest of the audit as it is.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from millrace.internal.v1 import batch_pb2
from millrace.readers.exports.metrics import read_metrics
from millrace.readers.exports.samples import read_samples
from millrace.readers.repair import repair_run
from millrace.rollouts.batch_wire import decode_header
from millrace.runlog import chain_hash
from millrace.runlog.catalogue import EPOCH, KINDS, RUN_JSON, SCORES
from millrace.runlog.event_archive import encode_archive
from millrace.runlog.names import Deployment
from millrace.runlog.records.run_record import published_policies
from millrace.runlog.redis.entry import FORMAT_MAJOR, Entry
from millrace.storage.base import revision_key
from millrace.v1 import event_pb2
from millrace_testing.runlog.recorded_log import sha256
from millrace_testing.runlog.scene import (
    PREFIX,
    STEPS,
    Scene,
    canonical,
    first,
    last,
    read_header,
    record_scene,
    rehash,
)
from millrace_testing.runlog.tamperings import add


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, redis_url) -> Scene:
    return record_scene(tmp_path_factory.mktemp("recorded"), redis_url)


@pytest.fixture
def scene(recorded) -> Iterator[Scene]:
    yield recorded
    recorded.store.undo()


def archive(scene: Scene, *, first_id: str, writer: str = "orchestrator-9") -> str:
    """Return an archive with an evaluation that nobody made; returns its key."""
    event = event_pb2.Event(writer=writer, writer_sequence=1)
    event.time.FromSeconds(1_700_000_100)
    event.eval_completed.env, event.eval_completed.reward_mean, event.eval_completed.step = "made-up", 1.0, STEPS
    data = event.SerializeToString(deterministic=True)
    entry = Entry(id=first_id, v=FORMAT_MAJOR, h=sha256(data), d=data, tp="")
    key = scene.names.archived_events(first_id, first_id)
    assert scene.store.create(key, encode_archive([entry]))
    return key


def copied(scene: Scene, source: str, target: str) -> str:
    assert scene.store.create(target, scene.store.get(source))
    return target


def step_behind_the_end(scene: Scene) -> str:
    """Return another closing header, and the archive of a step, chained to the end."""
    header = read_header(scene.store, scene.names, STEPS - 1)
    before = scene.store.get(scene.names.batch_header(STEPS))
    header.step, header.previous_chain_hash = STEPS + 1, chain_hash(decode_header(before).previous_chain_hash, before)
    key = scene.names.batch_header(STEPS + 1)
    scene.store.put(key, header.SerializeToString(deterministic=True))
    return key


def next_policy(scene: Scene) -> str:
    key = scene.names.policy_manifest(0, STEPS + 1)
    manifest = json.loads(scene.store.get(scene.names.policy_manifest(0, STEPS)))
    scene.store.put(key, json.dumps({**manifest, "version": STEPS + 1, "key": key}).encode())
    return key


def next_revision(scene: Scene) -> str:
    key = revision_key(scene.names.policy_manifest(0, STEPS), 1)
    manifest = json.loads(scene.store.get(scene.names.policy_manifest(0, STEPS)))
    scene.store.put(key, json.dumps({**manifest, "key": key}).encode())
    return key


def empty_mark(scene: Scene, number: int) -> str:
    scene.store.put(scene.names.generation(number), b"")
    return scene.names.generation(number)


def with_epoch(scene: Scene, number: int) -> str:
    copied(scene, scene.names.epoch("log", 1), scene.names.epoch("log", number))
    return empty_mark(scene, number)


ADDED: dict[str, Callable[[Scene], str]] = {
    **{f"the next {kind.name}": partial(add, kind=kind) for kind in KINDS if kind not in (RUN_JSON, SCORES, EPOCH)},
    "an epoch that no trainer can have": lambda s: copied(s, s.names.epoch("trainer", 1), s.names.epoch("trainer", 3)),
    "an evaluation in an archive of events": lambda s: archive(s, first_id="1-9999"),
    "an archive of a later generation": lambda s: archive(s, first_id="2-1"),
    "a copy of an archive under a wider name": lambda s: copied(
        s, last(s.store, s.names.event_archive), s.names.archived_events("1-1", "1-88888")
    ),
    "what is no archive among the events": lambda s: copied(s, s.names.run_json, s.names.event_archive + "notes.txt"),
    "a seal under another name": lambda s: copied(s, s.names.seal(0), s.names.seals + "copy.json"),
    "the next epoch of the orchestrator": lambda s: copied(
        s, s.names.epoch("orchestrator", 1), s.names.epoch("orchestrator", 2)
    ),
    "an epoch of a role that nobody has": lambda s: copied(s, s.names.epoch("trainer", 1), s.names.epoch("judge", 1)),
    "the mark of a generation, and its epoch": lambda s: with_epoch(s, 3),
    "a step behind the end": step_behind_the_end,
    "a header under a longer name": lambda s: copied(
        s, s.names.batch_header(3), s.names.batches + "000000003.pb"
    ),
    "the next version": next_policy,
    "a successor of a manifest": next_revision,
    "another object of a version": lambda s: copied(
        s, first(s.store, s.names.policy(0, 8), ".safetensors"), s.names.policy(0, 8) + "e00000001-ffff/more.bin"
    ),
    "a version of another lineage": lambda s: copied(
        s, s.names.policy_manifest(0, 3), s.names.policy_manifest(1, 3)
    ),
    "a checkpoint": lambda s: copied(s, s.names.checkpoint_manifest(5), s.names.checkpoint_manifest(6)),
    "a file of a checkpoint": lambda s: copied(
        s, first(s.store, s.names.checkpoint(5) + "e"), s.names.checkpoint(5) + "e00000001-abcd/more.bin"
    ),
    "an object of no kind": lambda s: copied(s, s.names.run_json, s.names.root + "notes/readme.txt"),
    "a second run.json": lambda s: copied(s, s.names.run_json, s.names.root + "run.json.bak"),
    "a second name": lambda s: copied(
        s, Deployment(PREFIX).name_object("demo"), Deployment(PREFIX).name_object("second")
    ),
    "a second request": lambda s: copied(
        s, Deployment(PREFIX).request_object("request-demo"), Deployment(PREFIX).request_object("again")
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ADDED)
def test_what_is_added_to_a_sealed_run_is_named_and_not_exported(scene, case: str) -> None:
    rows, versions = read_metrics(scene.store, scene.names), dict(published_policies(scene.store, scene.names))
    samples = [each.step for each in read_samples(scene.store, scene.names)]
    key = ADDED[case](scene)
    found = [f"{each.check}: {each.message}" for each in scene.audit("deep").violations]
    assert any(key in each for each in found), found
    if case != "the next reopening":  # the run goes on then, as far as its readers can see
        assert read_metrics(scene.store, scene.names) == rows
        assert dict(published_policies(scene.store, scene.names)) == versions
    assert [each.step for each in read_samples(scene.store, scene.names)] == samples


def test_other_times_of_objects_are_no_tampering(scene, recorded) -> None:
    for path in recorded.directory.rglob("*"):
        os.utime(path, (1, 1))
    assert list(scene.audit("deep").violations) == []


def test_files_of_a_trainer_that_came_when_all_was_done_are_a_note(scene) -> None:
    """It writes the files of its model first, and learns after that that the run has ended."""
    epoch = scene.names.epoch("trainer", 2)
    scene.store.put(epoch, scene.store.get(scene.names.epoch("trainer", 1)))
    seal = json.loads(scene.store.get(scene.names.seal(0)))
    seal["others"][epoch.removeprefix(scene.names.root)] = len(scene.store.get(epoch))
    scene.store.put(scene.names.seal(0), json.dumps(seal).encode())
    scene.store.delete(scene.names.attestation(1))  # it names the seal's bytes
    before = [each.check for each in scene.audit("deep").violations]
    scene.store.put(scene.names.root + "policy-files/e2-abcdef012345/config.json", b"{}")
    report = scene.audit("deep")
    assert [each.check for each in report.violations] == before
    assert any("policy-files/e2-" in each.message for each in report.notes if each.check == "WRITTEN_BEHIND_SEAL")


def test_an_epoch_that_a_trainer_took_while_the_seal_was_written_is_a_note(scene) -> None:
    """It looks for the seal first, so that it takes one epoch at most; nobody takes one after that."""
    before = [each.check for each in scene.audit("deep").violations]
    epoch = scene.store.get(scene.names.epoch("trainer", 1))
    scene.store.put(scene.names.epoch("trainer", 2), epoch)
    report = scene.audit("deep")
    assert [each.check for each in report.violations] == before
    notes = [each.message for each in report.notes if each.check == "WRITTEN_BEHIND_SEAL"]
    assert any("epochs/trainer/00000002" in note for note in notes)
    scene.store.put(scene.names.epoch("trainer", 3), epoch)
    added = [each.message for each in scene.audit("deep").violations if each.check == "EPOCH_UNNAMED"]
    assert len(added) == 1 and "epochs/trainer/00000003" in added[0]


def test_what_dead_writers_left_before_the_end_is_a_note(scene) -> None:
    """The seal lists it, so that it is apart from what came later."""
    key = scene.names.checkpoint(4) + "e00000001-dead/rank-00000.bin"
    scene.store.put(key, b"torn")
    seal = json.loads(scene.store.get(scene.names.seal(0)))
    seal["others"][key.removeprefix(scene.names.root)] = 4
    scene.store.put(scene.names.seal(0), json.dumps(seal).encode())
    scene.store.delete(scene.names.attestation(1))  # it names the seal's bytes
    report = scene.audit("deep")
    assert list(report.violations) == []
    assert any("rank-00000.bin" in each.message for each in report.notes if each.check == "LEFT_OVER")
    scene.store.put(key, b"torn, and changed")
    assert {each.check for each in scene.audit("fast").violations} == {"OBJECT_CHANGED"}


def test_a_seal_that_lists_nothing_says_what_it_cannot_see(scene) -> None:
    """As releases before wrote it."""
    seal = json.loads(scene.store.get(scene.names.seal(0)))
    del seal["others"]
    scene.store.put(scene.names.seal(0), json.dumps(seal).encode())
    scene.store.delete(scene.names.attestation(1))
    report = scene.audit("deep")
    assert list(report.violations) == [] and "UNNAMED_OBJECTS" in {each.check for each in report.not_seen}


def test_a_checkpoint_of_other_weights_than_the_policy_of_its_step_is_found(scene) -> None:
    """Every hash fits: the checkpoint is what its manifest says, and its manifest what event and seal would say."""
    names, store = scene.names, scene.store
    assert not [each for each in scene.audit("deep").not_seen if each.check == "CHECKPOINTS_NOT_COMPARED"]
    key = names.checkpoint(10) + "e00000001-abcd/rank-00000.bin"
    data = bytearray(store.get(key))
    data[4 * 7 + 3] ^= 0x40  # the eighth element of a.weight
    store.put(key, bytes(data))
    rehash(scene)
    found = [f"{each.check}: {each.message}" for each in scene.audit("deep").violations]
    (differs,) = [each for each in found if each.startswith("CHECKPOINT_DIFFERS")]
    assert "checkpoint 10 is not policy 0-10: 1 of 1200 elements of tensor a.weight (bfloat16)" in differs


# Keys that lead elsewhere.

ESCAPES = ["../../../../etc/passwd", "/etc/passwd", "a//b", "a/./b", "a\0b", ".tmp/x", "x" * 300, "y/" * 600 + "z"]


def _header_key(field: str) -> Callable[[Scene, str], None]:
    def change(scene: Scene, key: str) -> None:
        header = batch_pb2.BatchHeader.FromString(scene.store.get(scene.names.batch_header(3)))
        if field == "chunk":
            header.chunks[0].key = key
        elif field == "archive":
            header.rollouts_key = key
        else:
            header.objects[0].key = key
        data = header.SerializeToString(deterministic=True)
        scene.store.put(scene.names.batch_header(3), data)
        _rechain(scene, from_step=4)

    return change


def _rechain(scene: Scene, *, from_step: int) -> None:
    """Every header names the chain hash after the one before it."""
    for step in range(from_step, STEPS + 1):
        before = scene.store.get(scene.names.batch_header(step - 1))
        header = batch_pb2.BatchHeader.FromString(scene.store.get(scene.names.batch_header(step)))
        header.previous_chain_hash = chain_hash(batch_pb2.BatchHeader.FromString(before).previous_chain_hash, before)
        scene.store.put(scene.names.batch_header(step), header.SerializeToString(deterministic=True))


def _manifest_key(place: Callable[[Scene], str], change: Callable[[dict, str], None]) -> Callable[[Scene, str], None]:
    def rewrite(scene: Scene, key: str) -> None:
        manifest = json.loads(scene.store.get(place(scene)))
        change(manifest, key)
        scene.store.put(place(scene), canonical(manifest))

    return rewrite


NAMING: dict[str, tuple[str, Callable[[Scene, str], None]]] = {
    "header, a chunk": ("00000003.pb", _header_key("chunk")),
    "header, the archive": ("00000003.pb", _header_key("archive")),
    "header, an object": ("00000003.pb", _header_key("object")),
    "policy's manifest, an object": (
        "policy 0-8",
        _manifest_key(
            lambda s: s.names.policy_manifest(0, 8), lambda m, key: m["encodings"][0]["objects"][0].update(key=key)
        ),
    ),
    "policy's manifest, a file": (
        "policy 0-8",
        _manifest_key(lambda s: s.names.policy_manifest(0, 8), lambda m, key: m["files"][0].update(key=key)),
    ),
    "policy's manifest, its own": (
        "0000-00000008",
        _manifest_key(lambda s: s.names.policy_manifest(0, 8), lambda m, key: m.update(key=key)),
    ),
    "checkpoint's manifest": (
        "checkpoint 5",
        _manifest_key(lambda s: s.names.checkpoint_manifest(5), lambda m, key: m["objects"][0].update(key=key)),
    ),
    "seal, an object": (
        "seals/00000000.json",
        _manifest_key(lambda s: s.names.seal(0), lambda m, key: m["objects"].update({key: "ab" * 32})),
    ),
    "seal, another": (
        "seals/00000000.json",
        _manifest_key(lambda s: s.names.seal(0), lambda m, key: m["others"].update({key: 1})),
    ),
}


@pytest.fixture(scope="module")
def before(recorded):
    """Return what an audit says of the run that nobody has changed."""
    return recorded.audit("deep")


@pytest.mark.parametrize("case", NAMING)
def test_a_key_that_leads_elsewhere_is_a_violation_of_what_names_it(scene, before, case: str) -> None:
    named, change = NAMING[case]
    for key in ESCAPES if case.startswith("header, a chunk") else (ESCAPES[0], ESCAPES[6]):
        change(scene, key)
        report = scene.audit("deep")
        found = [f"{each.check}: {each.message}" for each in report.violations]
        assert any(named in each for each in found), (key, found)
        assert report.num_bytes_verified >= before.num_bytes_verified // 2, "the rest is audited"
        assert report.is_closed and report.num_policies == before.num_policies


def test_a_damaged_step_does_not_end_the_repair(scene) -> None:
    _header_key("chunk")(scene, "../../../../etc/passwd")
    repairs = asyncio.run(repair_run(None, scene.store, scene.names))
    assert any(scene.names.batch_header(3) == each.key for each in repairs)
