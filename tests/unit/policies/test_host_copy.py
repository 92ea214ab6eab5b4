"""Versions of several ranks, as deltas, skip deltas and anchors: a host copy follows them and never holds a mixture."""

import json
from pathlib import Path

import numpy as np
import pytest

from millrace.errors import ConflictError, UnavailableError
from millrace.policies.fetch import Manifests
from millrace.policies.host_copy import FILE_NAME, HostCopy, download_hf, pull_tensors
from millrace.policies.manifest import CODEC_DELTA, Encoding, PolicyManifest
from millrace.policies.tensors import TensorBytes, read_places
from millrace.storage.local import LocalStore
from millrace_testing.committed_versions import NAMES, SHAPES, Trainer


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_copy_follows_the_versions_of_every_rank(store: LocalStore, world_size: int, tmp_path: Path) -> None:
    trainer = Trainer(store, world_size=world_size, anchor_interval=6, skip_deltas=[4]).publish_to(13)
    assert [v for v in range(14) if trainer.manifest(v).full] == [0, 6, 12]
    assert [[d.base for d in trainer.manifest(v).deltas] for v in (1, 4, 8)] == [[0], [0, 3], [4, 7]]
    assert all(len(e.objects) == world_size for e in trainer.manifest(8).encodings)
    copy = HostCopy(store)
    for version in range(14):
        staged = trainer.require(copy, version)
        if version == 0:
            assert staged.base is None and staged.changes is None and staged.fetched_bytes > staged.full_bytes
            continue
        assert staged.base == (0, version - 1) and staged.changes is not None
        assert staged.fetched_bytes < staged.full_bytes / 4
        before = {n: np.frombuffer(d, np.uint16).copy() for n, d in trainer.history[version - 1].items()}
        for name, changes in staged.changes.items():
            for change in changes:
                change.apply(before[name])
        assert {name: bits.tobytes() for name, bits in before.items()} == trainer.history[version]
    assert {n: bytes(t.data) for n, t in pull_tensors(store, trainer.manifest(11)).items()} == trainer.history[11]
    data = (download_hf(store, trainer.manifest(11), tmp_path / "hf") / "model.safetensors").read_bytes()
    for place in read_places(data, source="hf"):
        assert data[place.offset : place.offset + place.length_bytes] == trainer.history[11][place.name]


def test_who_is_behind_reads_few_objects_and_manifests(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(store, anchor_interval=256).publish_to(37)
    copy = HostCopy(store)
    trainer.require(copy, 5)
    read: list[str] = []
    get, get_range = store.get, store.get_range
    monkeypatch.setattr(store, "get", lambda key, **bound: read.append(key) or get(key, **bound))
    monkeypatch.setattr(
        store, "get_range", lambda key, start, length: read.append(key) or get_range(key, start, length)
    )
    staged = trainer.require(copy, 37)
    versions = [int(key.split("/policies/0000-")[1][:8]) for key in read]
    # 37 ← 36 ← 32 ← 16 ← 12 ← 8 ← 7 ← 6 ← 5: eight deltas, and the manifests between.
    assert [v for v, key in zip(versions, read, strict=True) if key.endswith(".bin")] == [6, 7, 8, 12, 16, 32, 36, 37]
    assert sorted(v for v, key in zip(versions, read, strict=True) if key.endswith("json")) == [
        6,
        7,
        8,
        12,
        16,
        32,
        36,
        37,
    ]
    assert staged.base == (0, 5) and staged.changes is not None
    assert sum(c.num_elements for changes in staged.changes.values() for c in changes) < 8000 * 0.4


def test_a_chain_that_costs_more_than_the_anchor_is_not_taken(store: LocalStore) -> None:
    trainer = Trainer(store, share=0.3, anchor_interval=10, skip_deltas=[]).publish_to(12)
    copy = HostCopy(store)
    trainer.require(copy, 1)
    staged = trainer.require(copy, 12)
    assert staged.base is None and staged.changes is None and staged.full_bytes < staged.fetched_bytes
    assert staged.fetched_bytes < 2 * staged.full_bytes


def test_where_everything_changes_every_version_is_full(store: LocalStore) -> None:
    trainer = Trainer(store)
    trainer.publish(0)
    for version in (1, 2):
        for name, array in trainer.weights.items():
            trainer.weights[name] = trainer.rng.integers(0, 2**16, array.shape).astype(np.uint16)
        assert trainer.publish(version).codecs == "full"
    trainer.require(HostCopy(store), 2)


def test_a_version_without_changes_has_no_objects(store: LocalStore) -> None:
    trainer = Trainer(store, share=0.0).publish_to(2)
    assert trainer.manifest(2).encodings == (
        Encoding(codec=CODEC_DELTA, base=1, base_digest=trainer.manifest(1).digest, objects=(), pieces=()),
    )
    copy = HostCopy(store)
    trainer.require(copy, 1)
    staged = trainer.require(copy, 2)
    assert staged.fetched_bytes == 0 and staged.changes == {} and staged.base == (0, 1)
    assert trainer.require(copy, 2).base == (0, 2)


def test_a_file_that_other_processes_map(store: LocalStore, tmp_path: Path) -> None:
    trainer = Trainer(store).publish_to(3)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / FILE_NAME).write_bytes(b"what a dead process left")
    copy = HostCopy(store, directory=tmp_path / "copy")
    for version in (1, 2, 3):
        staged = trainer.require(copy, version)
        assert staged.path is not None and staged.places is not None
        data = staged.path.read_bytes()
        assert {p.name for p in read_places(data, source="copy")} == set(SHAPES)
        for name, place in staged.places.items():
            assert data[place.offset : place.offset + place.length_bytes] == trainer.history[version][name]


def test_tensors_of_another_shape_are_read_from_their_anchor(store: LocalStore) -> None:
    trainer = Trainer(store).publish_to(1)
    copy = HostCopy(store)
    trainer.require(copy, 1)
    other = Trainer(LocalStore(Path(store.uri("").removeprefix("file://"))), lineage=1)
    other.weights = {"other": np.arange(12, dtype=np.uint16).reshape(3, 4)}
    other.publish(2)
    staged = other.require(copy, 2)
    assert staged.base is None and set(staged.tensors) == {"other"}


def test_a_resumed_trainer_continues_with_a_delta(store: LocalStore) -> None:
    first = Trainer(store).publish_to(3)
    before = {info.key for info in store.list("")}
    again = Trainer(store)
    again.weights, again.history = dict(first.weights), dict(first.history)
    again.publish(3)
    assert {info.key for info in store.list("")} == before, "a replay uploads nothing"
    again.move()
    assert again.publish(4).codecs == "delta"
    again.require(HostCopy(store), 4)
    adopted = Trainer(store)
    adopted.committers[0].adopt(4, again.parts(0))
    adopted.weights, adopted.history = dict(again.weights), dict(again.history)
    adopted.move()
    assert adopted.publish(5).codecs == "delta"
    adopted.require(HostCopy(store), 5)


def test_weights_that_are_not_those_of_the_committed_version_are_not_adopted(store: LocalStore) -> None:
    first = Trainer(store).publish_to(3)
    other = Trainer(store)
    other.weights, other.history = dict(first.weights), dict(first.history)
    other.move()
    other.committers[0].adopt(3, other.parts(0))
    assert other.publish(4).codecs == "full"


def test_without_deltas_every_version_comes_from_its_anchor(store: LocalStore) -> None:
    trainer = Trainer(store, delta=False).publish_to(2)
    assert trainer.manifest(2).codecs == "full"
    copy = HostCopy(store)
    for version in (1, 2):
        assert trainer.require(copy, version).base is None


def test_tensor_bytes_cannot_be_written_through(store: LocalStore) -> None:
    trainer = Trainer(store).publish_to(0)
    tensor: TensorBytes = trainer.require(HostCopy(store), 0).tensors["embed"]
    with pytest.raises(TypeError, match="read-only"):
        tensor.data[0] = 1


@pytest.mark.parametrize("between", [1, 3])
def test_the_ranks_of_a_lineage_change_and_change_back(store: LocalStore, between: int) -> None:
    trainer = Trainer(store, world_size=2, skip_deltas=[], anchor_interval=256).publish_to(1)
    trainer = trainer.restart(world_size=between).publish_to(2).restart(world_size=2).publish_to(5)
    assert [trainer.manifest(version).codecs for version in range(6)] == ["full", *["delta"] * 5]
    follower = HostCopy(store)
    for version in range(6):
        assert trainer.require(follower, version).base == ((0, version - 1) if version else None)
    trainer.require(HostCopy(store), 5)
    late = HostCopy(store)
    trainer.require(late, 1)
    assert trainer.require(late, 4).base == (0, 1)
    assert trainer.require(late, 5).base == (0, 4)


@pytest.mark.parametrize(("bound", "num_reads"), [(10, 3), (100, 2)])
@pytest.mark.parametrize("limit", ["MAX_HELD_ENTRIES", "MAX_HELD"])
def test_manifests_are_held_up_to_a_number_and_a_number_of_pieces(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, limit: str, bound: int, num_reads: int
) -> None:
    Trainer(store).publish_to(1)
    monkeypatch.setattr(f"millrace.policies.fetch.{limit}", bound if limit == "MAX_HELD_ENTRIES" else bound // 10)
    manifests, read, get = Manifests(store), list[str](), store.get
    monkeypatch.setattr(store, "get", lambda key, **bound: read.append(key) or get(key, **bound))
    for version in (0, 1, 0):
        assert manifests.read(NAMES.policy_manifest(0, version)).version == version
    assert len(read) == num_reads


def test_of_whole_versions_nobody_needs_a_copy(store: LocalStore, tmp_path: Path) -> None:
    assert Trainer(store, lineage=1).publish_to(0).manifest(0).is_delta_base
    trainer = Trainer(store, delta=False).publish_to(2)
    assert [trainer.manifest(version).is_delta_base for version in range(3)] == [False] * 3
    copy = HostCopy(store, directory=tmp_path)
    trainer.require(copy, 1)
    assert (tmp_path / FILE_NAME).exists()
    copy.drop()
    assert copy.held is None and not (tmp_path / FILE_NAME).exists()
    trainer.require(copy, 2)


def test_a_manifest_that_does_not_say_so_may_have_successors(store: LocalStore) -> None:
    raw = json.loads(Trainer(store, delta=False).publish_to(0).manifest(0).to_bytes())
    del raw["is_delta_base"]
    assert PolicyManifest.from_bytes(json.dumps(raw).encode(), source="an older one").is_delta_base


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("is_late", [False, True], ids=["before it is looked up", "before it is created"])
def test_a_version_that_a_predecessor_wrote_meanwhile_ends_strict_runs_and_is_tried_again_in_others(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, world_size: int, is_late: bool
) -> None:
    for is_strict, version in ((True, 1), (False, 2)):
        old, new = (Trainer(store, world_size=world_size, lineage=version, is_strict=is_strict) for _ in range(2))
        new.move()
        if is_late:
            listed = store.list
            monkeypatch.setattr(
                store, "list", lambda prefix, listed=listed: [] if "/policies/" in prefix else listed(prefix)
            )
        assert all(not isinstance(done, Exception) for done in old.commit(version))
        first, *others = new.commit(version)
        monkeypatch.undo()
        expected = ("ConflictError", "POLICY_DIGEST_MISMATCH") if is_strict else ("UnavailableError", "POLICY_TAKEN")
        assert (type(first).__name__, first.reason) == expected
        assert all(isinstance(other, ConflictError if is_strict else UnavailableError) for other in others)
