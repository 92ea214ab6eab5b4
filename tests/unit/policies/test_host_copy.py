"""Versions of several ranks, as deltas, skip deltas and anchors: a host copy follows them and never holds a mixture."""

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from millrace.config.trainer import PolicyConfig
from millrace.errors import CorruptObjectError, MillraceError, UnavailableError
from millrace.policies.chain import Manifests
from millrace.policies.host_copy import FILE_NAME, HostCopy
from millrace.policies.manifest import CODEC_DELTA, Encoding, PolicyManifest
from millrace.policies.parts import TensorPart
from millrace.policies.pull import download_hf, pull_tensors, read_manifest
from millrace.policies.tensors import TensorBytes, read_places
from millrace.runlog import Names
from millrace.storage.local import LocalStore
from millrace.trainer import commit
from millrace.trainer.commit import Committer, VersionInput
from millrace.trainer.distributed import Gang

SHAPES = {"embed": (1000, 8), "empty": (0, 4), "norm": (7,), "odd": (5, 3), "scalar": ()}
NAMES = Names("p", "u")


class ThreadGang(Gang):
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, world_size: int, board: "Board") -> None:
        super().__init__(rank=rank, world_size=world_size)
        self._board = board

    def gather(self, data: bytes) -> list[bytes]:
        return self._board.exchange(self.rank, data)

    def broadcast(self, data: bytes | None) -> bytes:
        return self.gather(data or b"")[0]

    def sum(self, values) -> list[float]:
        rows = [json.loads(row) for row in self.gather(json.dumps(list(values)).encode())]
        return [float(sum(column)) for column in zip(*rows, strict=True)]


class Board:
    def __init__(self, size: int) -> None:
        self._rows: list[bytes] = [b""] * size
        self._barrier = threading.Barrier(size)

    def exchange(self, rank: int, data: bytes) -> list[bytes]:
        self._rows[rank] = data
        self._barrier.wait(20)
        rows = list(self._rows)
        self._barrier.wait(20)
        return rows


class Trainer:
    """Publishes versions whose weights move a little at each step, with `world_size` ranks."""

    def __init__(
        self, store: LocalStore, *, world_size: int = 1, share: float = 0.01, lineage: int = 0, **config
    ) -> None:
        board = Board(world_size)
        self.store = store
        self.lineage = lineage
        self.config = config
        self.share = share
        self.rng = np.random.default_rng(5)
        self.world_size = world_size
        self.weights = {n: self.rng.integers(0, 2**16, s).astype(np.uint16) for n, s in SHAPES.items()}
        self.history: dict[int, dict[str, bytes]] = {}
        self.committers = [
            Committer(
                store=store,
                names=NAMES,
                gang=ThreadGang(rank, world_size, board),
                config=PolicyConfig.model_validate(config),
                lineage=lineage,
                epoch=1,
                files=(),
            )
            for rank in range(world_size)
        ]

    def parts(self, rank: int) -> list[TensorPart]:
        found = []
        for name, array in self.weights.items():
            if array.ndim == 0:
                if rank == 0:
                    found.append(self._part(name, array, 0, array.reshape(-1)))
                continue
            chunk = -(-array.shape[0] // self.world_size)
            rows = array[rank * chunk : (rank + 1) * chunk]
            start = min(rank * chunk, array.shape[0]) * int(np.prod(array.shape[1:]))
            found.append(self._part(name, array, start, rows.reshape(-1)))
        return found

    def _part(self, name: str, array: np.ndarray, start: int, bits: np.ndarray) -> TensorPart:
        return TensorPart(name=name, dtype="bfloat16", shape=array.shape, start=start, bits=bits.copy())

    def move(self) -> None:
        for name, array in self.weights.items():
            chosen = self.rng.random(array.shape) < self.share
            self.weights[name] = np.where(chosen, array + 1, array).astype(np.uint16)

    def commit(self, version: int) -> list:
        """What the commit gives or raises at every rank."""
        return self._at_every_rank(
            lambda rank, parts: self.committers[rank].commit(VersionInput(version=version, parts=parts, probe=None))
        )

    def restart(self, *, world_size: int) -> "Trainer":
        """A trainer with other ranks that goes on from the last version of this one."""
        other = Trainer(self.store, world_size=world_size, lineage=self.lineage, **self.config)
        other.weights, other.history, other.rng = dict(self.weights), self.history, self.rng
        assert (
            other._at_every_rank(lambda rank, parts: other.committers[rank].adopt(len(self.history) - 1, parts))
            == [None] * world_size
        )
        return other

    def _at_every_rank(self, act: Callable[[int, list[TensorPart]], object]) -> list:
        parts = [self.parts(rank) for rank in range(self.world_size)]
        done: list = [None] * self.world_size

        def run(rank: int) -> None:
            try:
                done[rank] = act(rank, parts[rank])
            except Exception as error:  # noqa: BLE001 - a thread's edge: compared by the test
                done[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return done

    def publish(self, version: int) -> PolicyManifest:
        done = self.commit(version)
        for each in done:
            if isinstance(each, Exception):
                raise each
        assert [committed.published is None for committed in done] == [rank > 0 for rank in range(self.world_size)]
        self.history[version] = {name: array.tobytes() for name, array in self.weights.items()}
        return done[0].published.manifest

    def publish_to(self, last: int) -> "Trainer":
        for version in range(len(self.history), last + 1):
            if version:
                self.move()
            self.publish(version)
        return self

    def manifest(self, version: int) -> PolicyManifest:
        return read_manifest(self.store, NAMES.policy_manifest(self.lineage, version))

    def require(self, copy: HostCopy, version: int):
        staged = copy.stage(NAMES.policy_manifest(self.lineage, version))
        assert {name: bytes(tensor.data) for name, tensor in staged.tensors.items()} == self.history[version]
        return staged


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


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
    monkeypatch.setattr(store, "get", lambda key: read.append(key) or get(key))
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


def _damage(trainer: Trainer, version: int, base: int | None) -> str:
    manifest = trainer.manifest(version)
    (encoding,) = [e for e in manifest.encodings if e.base == base]
    key = encoding.objects[0].key
    data = bytearray(trainer.store.get(key))
    data[len(data) // 2] ^= 1
    trainer.store.put(key, bytes(data))
    return key


def test_damage_is_gone_around_where_there_is_another_way(store: LocalStore, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(store, anchor_interval=4).publish_to(4)
    copy = HostCopy(store)
    trainer.require(copy, 3)
    _damage(trainer, 4, 3)
    staged = trainer.require(copy, 4)
    assert staged.base is None and staged.fetched_bytes > staged.full_bytes
    assert [record.message for record in caplog.records] == [
        "part of a policy is damaged; looking for another way to it"
    ]
    _damage(trainer, 4, None)
    copy.forget()
    trainer.require(copy, 4)  # by the skip delta from version 0


def test_damage_without_another_way_names_the_object_and_leaves_the_copy(store: LocalStore) -> None:
    trainer = Trainer(store, skip_deltas=[]).publish_to(4)
    copy = HostCopy(store)
    trainer.require(copy, 2)
    key = _damage(trainer, 3, 2)
    for version in (3, 4):
        with pytest.raises(CorruptObjectError, match="has sha256") as caught:
            copy.stage(NAMES.policy_manifest(0, version))
        assert key in str(caught.value) and caught.value.reason == "POLICY_OBJECT_HASH_MISMATCH"
    trainer.require(copy, 2)
    store.delete(key)
    with pytest.raises(MillraceError, match=key.rpartition("/")[2]):
        copy.stage(NAMES.policy_manifest(0, 3))
    trainer.require(copy, 2)


def _replace(trainer: Trainer, version: int, **fields) -> None:
    key = NAMES.policy_manifest(0, version)
    data = dataclasses.replace(trainer.manifest(version), **fields).to_bytes()
    trainer.store.delete(key)
    trainer.store.create(key, data)


@pytest.fixture
def three(store: LocalStore) -> Iterator[tuple[Trainer, HostCopy]]:
    trainer = Trainer(store, skip_deltas=[]).publish_to(3)
    copy = HostCopy(store)
    trainer.require(copy, 2)
    yield trainer, copy
    assert copy.held is not None
    trainer.require(copy, 2)


def test_an_unknown_codec(three: tuple[Trainer, HostCopy]) -> None:
    trainer, copy = three
    _replace(trainer, 3, encodings=(dataclasses.replace(trainer.manifest(3).encodings[0], codec="delta9"),))
    with pytest.raises(CorruptObjectError, match=r"policy 0-3 has only encodings of unknown codecs: delta9") as caught:
        copy.stage(NAMES.policy_manifest(0, 3))
    assert caught.value.reason == "POLICY_CODEC_UNKNOWN"


def test_a_delta_against_other_weights(three: tuple[Trainer, HostCopy]) -> None:
    trainer, copy = three
    _replace(trainer, 3, encodings=(dataclasses.replace(trainer.manifest(3).encodings[0], base_digest="0" * 64),))
    with pytest.raises(
        CorruptObjectError, match=r"against version 2 of 0-3 is against digest 0000.*, held is"
    ) as caught:
        copy.stage(NAMES.policy_manifest(0, 3))
    assert caught.value.reason == "POLICY_CHAIN_BROKEN"


def test_a_delta_that_says_it_is_against_the_held_weights_and_is_not(three: tuple[Trainer, HostCopy]) -> None:
    trainer, copy = three
    second = trainer.manifest(2)
    wrong = dataclasses.replace(second.encodings[0], base=2, base_digest=second.digest)  # was 1 → 2
    third = trainer.manifest(3)
    _replace(trainer, 3, encodings=(dataclasses.replace(wrong, pieces=wrong.pieces),), digest=third.digest)
    with pytest.raises(MillraceError):
        copy.stage(NAMES.policy_manifest(0, 3))


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


def test_a_damaged_copy_is_not_taken_for_a_damaged_delta(
    store: LocalStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(store, skip_deltas=[]).publish_to(4)
    copy = HostCopy(store, directory=tmp_path / "copy")
    staged = trainer.require(copy, 2)
    assert staged.path is not None and staged.places is not None
    second, third = (np.frombuffer(trainer.history[version]["embed"], np.uint16) for version in (2, 3))
    with staged.path.open("r+b") as file:
        file.seek(staged.places["embed"].offset + 2 * int(np.flatnonzero(second != third)[0]))
        low = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([low ^ 4]))
    anew = trainer.require(copy, 3)
    assert anew.base is None and anew.changes is None
    assert [record.message for record in caplog.records] == [
        "a policy delta does not fit the held copy, which may be damaged; beginning anew at an anchor"
    ]
    assert trainer.require(copy, 4).base == (0, 3)


@pytest.mark.parametrize(("bound", "num_reads"), [(10, 3), (100, 2)])
def test_manifests_are_held_up_to_a_number_of_pieces(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, bound: int, num_reads: int
) -> None:
    Trainer(store).publish_to(1)
    monkeypatch.setattr("millrace.policies.chain._MAX_HELD_ENTRIES", bound)
    manifests, read, get = Manifests(store), list[str](), store.get
    monkeypatch.setattr(store, "get", lambda key: read.append(key) or get(key))
    for version in (0, 1, 0):
        assert manifests.read(NAMES.policy_manifest(0, version)).version == version
    assert len(read) == num_reads


@pytest.mark.parametrize(
    ("where", "failing"), [("upload_full", 0), ("upload_full", 1), ("pack_digests", 1), ("commit_policy", 0)]
)
def test_what_fails_at_one_rank_fails_at_all(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, where: str, failing: int
) -> None:
    trainer = Trainer(store, world_size=3)
    whole = getattr(commit, where)
    of_thread = threading.local()
    for rank, committer in enumerate(trainer.committers):
        publish = committer._publish

        def note(version: VersionInput, rank: int = rank, publish=publish):
            of_thread.rank = rank
            return publish(version)

        monkeypatch.setattr(committer, "_publish", note)

    def fail(*args, **kwargs):
        if of_thread.rank == failing:
            raise MemoryError
        return whole(*args, **kwargs)

    monkeypatch.setattr(commit, where, fail)
    done = trainer.commit(0)
    assert isinstance(done[failing], MemoryError)
    others = [error for rank, error in enumerate(done) if rank != failing]
    assert [(type(error), error.reason) for error in others] == [(UnavailableError, "POLICY_NOT_COMMITTED")] * 2
    assert all(f"rank {failing} failed with MemoryError" in str(error) for error in others)
    monkeypatch.setattr(commit, where, whole)
    trainer.publish(0)  # they are in step
    trainer.require(HostCopy(store), 0)


def test_a_store_that_fails_rank_0_fails_all(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(store, world_size=2)

    def head(key: str) -> None:
        raise OSError(key)

    with monkeypatch.context() as patch:
        patch.setattr(store, "head", head)
        done = trainer.commit(0)
    assert isinstance(done[0], OSError) and isinstance(done[1], UnavailableError)
    trainer.publish(0)
