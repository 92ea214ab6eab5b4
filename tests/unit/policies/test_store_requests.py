"""What a version costs in requests to the object store: every step of every run pays it, of every replica again."""

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from millrace.policies.host_copy import HostCopy
from millrace.storage.local import LocalStore
from millrace.trainer.publish.commit import VersionInput
from millrace_testing.committed_versions import NAMES, Trainer

METHODS = ("get", "get_range", "head", "list", "list_prefixes", "create", "put")


class CountingStore(LocalStore):
    """A store that counts what it is asked."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.requests: Counter[str] = Counter()

    def taken(self) -> dict[str, int]:
        """Return the requests since the last call."""
        found, self.requests = dict(self.requests), Counter()
        return found


def _counted(name: str) -> Any:
    def call(self: CountingStore, *arguments: Any, **more: Any) -> Any:
        self.requests[name] += 1
        return getattr(LocalStore, name)(self, *arguments, **more)

    return call


for method in METHODS:
    setattr(CountingStore, method, _counted(method))


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "store")


def announced(store: LocalStore, version: int) -> tuple[str, bytes]:
    key = NAMES.policy_manifest(0, version)
    return key, hashlib.sha256(LocalStore.get(store, key)).digest()


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_step_costs_few_requests(store: CountingStore, world_size: int) -> None:
    trainer = Trainer(store, world_size=world_size, skip_deltas=[]).publish_to(0)
    copy = HostCopy(store)
    copy.stage(*announced(store, 0))
    for version in range(1, 5):
        trainer.move()
        store.taken()
        trainer.publish(version)
        # Is there one? Each rank's delta; the newest epoch; the manifest.
        assert store.taken() == {"list": 2, "put": world_size, "create": 1}
        copy.stage(*announced(store, version))
        assert store.taken() == {"get": 1, "get_range": world_size}, "the manifest, and each rank's delta"


def test_a_replica_finds_a_successor_although_it_looks_for_none(store: CountingStore) -> None:
    trainer = Trainer(store, skip_deltas=[]).publish_to(1)
    copy = HostCopy(store)
    copy.stage(*announced(store, 1))
    trainer.publish_to(2)
    (delta,) = trainer.manifest(2).encodings[0].objects
    store.put(delta.key, bytes(delta.size_bytes))
    made = VersionInput(version=2, parts=trainer.parts(0), probe=None)
    digest = trainer.manifest(2).digest
    assert trainer.committers[0].republish(made, lineage=0, digest=digest, sha256=announced(store, 2)[1]) is not None
    assert copy.stage(*announced(store, 2)).manifest.key.endswith("manifest.r1.json")
    trainer.publish_to(3)
    store.taken()
    copy.stage(*announced(store, 3))
    assert store.taken() == {"get": 1, "get_range": 1}, "it looks for successors no more"
