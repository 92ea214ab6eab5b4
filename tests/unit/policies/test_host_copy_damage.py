"""What a host copy and the ranks that commit do when something is damaged, is not what it says, or fails."""

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from millrace.errors import CorruptObjectError, InvalidStateError, MillraceError, UnavailableError
from millrace.policies import share
from millrace.policies.host_copy import HostCopy
from millrace.storage.local import LocalStore
from millrace.trainer.publish import commit
from millrace.trainer.publish.commit import VersionInput
from millrace_testing.committed_versions import NAMES, Trainer


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


@pytest.mark.parametrize(
    ("module", "where", "failing"),
    [(share, "upload_full", 0), (share, "upload_full", 1), (commit, "pack_digests", 1), (commit, "commit_policy", 0)],
)
def test_what_fails_at_one_rank_fails_at_all(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, module: ModuleType, where: str, failing: int
) -> None:
    trainer = Trainer(store, world_size=3)
    whole = getattr(module, where)
    of_thread = threading.local()
    for rank, committer in enumerate(trainer.committers):
        publish = committer.publish

        def note(version: VersionInput, key: str, rank: int = rank, publish=publish):
            of_thread.rank = rank
            return publish(version, key)

        monkeypatch.setattr(committer, "publish", note)

    def fail(*args, **kwargs):
        if of_thread.rank == failing:
            raise MemoryError
        return whole(*args, **kwargs)

    monkeypatch.setattr(module, where, fail)
    done = trainer.commit(0)
    assert isinstance(done[failing], MemoryError)
    others = [error for rank, error in enumerate(done) if rank != failing]
    assert [(type(error), error.reason) for error in others] == [(UnavailableError, "PEER_FAILED")] * 2
    assert all(f"rank {failing} failed: MemoryError" in str(error) for error in others)
    monkeypatch.setattr(module, where, whole)
    trainer.publish(0)  # they are in step
    trainer.require(HostCopy(store), 0)


def test_a_store_that_fails_rank_0_fails_all(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(store, world_size=2)

    def fail(prefix: str) -> None:
        raise OSError(prefix)

    with monkeypatch.context() as patch:
        patch.setattr(store, "list", fail)
        done = trainer.commit(0)
    assert isinstance(done[0], OSError) and isinstance(done[1], UnavailableError)
    trainer.publish(0)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("is_known", [True, False], ids=["digest known", "digest lost"])
def test_ranks_publish_a_damaged_version_anew_together(store: LocalStore, world_size: int, is_known: bool) -> None:
    trainer = Trainer(store, world_size=world_size, anchor_interval=100).publish_to(2)
    digest = trainer.manifest(2).digest

    def republish(*, expected: str = digest) -> list:
        return trainer.at_every_rank(
            lambda rank, parts: trainer.committers[rank].republish(
                VersionInput(version=2, parts=parts, probe=None), lineage=0, digest=expected, sha256=b""
            )
        )

    assert republish() == [None] * world_size, "it is whole"
    damaged = [entry.key for entry in trainer.manifest(2).encodings[0].objects]
    assert len(damaged) == world_size
    store.put(damaged[-1], b"x")  # only what another rank than the one that looks has uploaded
    first, *others = republish(expected=digest if is_known else "")
    assert others == [None] * (world_size - 1), "rank 0 tells of it"
    assert damaged[-1] in first.damage and first.manifest_key.endswith("manifest.r1.json")
    again = trainer.manifest(2)
    assert (again.digest, again.anchor) == (digest, 2) and len(again.full.objects) == world_size
    trainer.require(HostCopy(store), 2)
    assert republish() == [None] * world_size, "once"
    trainer.publish_to(4)
    assert trainer.manifest(4).anchor == 2, "every rank goes on from the new anchor"
    trainer.require(HostCopy(store), 4)


@pytest.mark.parametrize("failing", [0, 1])
def test_what_fails_at_one_rank_while_a_version_is_published_anew_fails_at_all(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    trainer = Trainer(store, world_size=2).publish_to(1)
    digest = trainer.manifest(1).digest
    store.put(trainer.manifest(1).encodings[0].objects[0].key, b"x")
    upload = share.upload_full

    def fail(held: LocalStore, base: str, parts: list) -> object:
        if base.endswith(f"r{failing:05d}-"):
            raise OSError("no more space")
        return upload(held, base, parts)

    monkeypatch.setattr(share, "upload_full", fail)
    done = trainer.at_every_rank(
        lambda rank, parts: trainer.committers[rank].republish(
            VersionInput(version=1, parts=parts, probe=None), lineage=0, digest=digest, sha256=b""
        )
    )
    assert isinstance(done[failing], OSError) and isinstance(done[1 - failing], UnavailableError)
    assert store.head(NAMES.policy_manifest(0, 1).replace("manifest.json", "manifest.r1.json")) is None


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_version_that_best_effort_computed_anew_is_lost_and_says_why(store: LocalStore, is_strict: bool) -> None:
    trainer = Trainer(store, is_strict=is_strict).publish_to(1)
    digest = trainer.manifest(1).digest
    _damage(trainer, 1, 0)
    trainer.move()  # a restart, and a replay that was not exact
    made = VersionInput(version=1, parts=trainer.parts(0), probe=None)
    with pytest.raises(InvalidStateError, match="cannot make it again") as raised:
        trainer.committers[0].republish(made, lineage=0, digest=digest, sha256=b"")
    assert raised.value.reason == "POLICY_LOST" and "run repair" in str(raised.value.remedy)
    assert ("best_effort" in raised.value.message) != is_strict
    assert store.head(NAMES.policy_manifest(0, 1).replace("manifest.json", "manifest.r1.json")) is None
