"""A disk that is really full: nothing torn, a name with figures, and on it goes once there is room."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from millrace.errors import CapacityError, InvalidStateError
from millrace.policies.host_copy import download_hf, pull_tensors, read_manifest
from millrace.policies.manifest import PolicyPlace
from millrace.policies.publish import PolicyContents, publish_policy
from millrace.policies.tensors import TensorBytes
from millrace.storage.clean_up import RetryPolicy
from millrace.storage.local import LocalStore
from millrace.storage.scratch import SCRATCH_VARIABLE, owned_directory
from millrace.telemetry import waits
from millrace.trainer.checkpoint.store import save_shards
from millrace.trainer.gang.distributed import Gang

HURRIED = RetryPolicy(max_attempts=2)
OBJECT = bytes(300_000)


def _leftovers(store_path: Path) -> list[str]:
    return [path.name for path in (store_path / ".tmp").iterdir()]


def test_a_full_disk_is_named_with_what_it_lacks_and_leaves_nothing(small_disk, tmp_path):
    store = LocalStore(small_disk.path / "store", retry=HURRIED)
    source = tmp_path / "source"
    source.write_bytes(OBJECT)
    store.put("there/before", b"old")
    small_disk.fill(leave_bytes=100_000)
    for call in (
        lambda: store.put("a/k", OBJECT),
        lambda: store.create("a/k", OBJECT),
        lambda: store.put_file("a/k", source),
        lambda: store.put("there/before", OBJECT),
    ):
        with pytest.raises(CapacityError, match=r"cannot write .*: No space left.*300000 bytes are needed") as caught:
            call()
        assert caught.value.reason == "DISK_FULL" and "MILLRACE_STORE_URL" in str(caught.value)
        assert caught.value.metadata["path"] in str(caught.value)
        assert 90_000 <= int(caught.value.metadata["free_bytes"]) <= 100_000
        assert _leftovers(small_disk.path / "store") == []
    assert [info.key for info in store.list("")] == ["there/before"], "no torn object"
    assert store.get("there/before") == b"old", "what is replaced stays until the new one is whole"
    assert store.create("small", b"x" * 1000) is True, "what fits is still stored"
    small_disk.make_room()
    assert store.create("a/k", OBJECT) is True
    assert store.get("a/k") == OBJECT


def test_a_disk_that_is_too_small_is_not_waited_for(small_disk):
    store, began = LocalStore(small_disk.path / "store", setting="output_dir"), time.monotonic()
    with pytest.raises(InvalidStateError, match=r"bytes are needed, and its whole disk has \d+.*output_dir") as caught:
        store.put("k", bytes(shutil.disk_usage(small_disk.path).total + 1))
    assert caught.value.reason == "DISK_TOO_SMALL" and time.monotonic() - began < 5


def test_a_write_waits_visibly_for_room_and_goes_on_by_itself(small_disk):
    store = LocalStore(small_disk.path / "store")
    small_disk.fill(leave_bytes=50_000)
    answers: list[bool] = []
    writer = threading.Thread(target=lambda: answers.append(store.create("k", OBJECT)))
    writer.start()
    ends = time.monotonic() + 20
    while not (seen := [w for w in waits.snapshot("me") if "No space left" in w.reason]) and time.monotonic() < ends:
        time.sleep(0.05)
    assert seen and seen[0].waits_on == "object store" and f"create {store.uri('k')}, attempt" in seen[0].reason
    assert not answers
    small_disk.make_room()
    writer.join(20)
    assert answers == [True] and store.get("k") == OBJECT


def test_a_download_to_a_full_disk(small_disk, tmp_path, s3_store):
    small_disk.fill(leave_bytes=100_000)
    for store in (LocalStore(tmp_path / "store"), s3_store):
        store.put("k", OBJECT)
        target = small_disk.path / "target"
        with pytest.raises(CapacityError, match=r"cannot write .*target.*300000 bytes are needed"):
            store.get_file("k", target)
        assert sorted(path.name for path in small_disk.path.iterdir()) == ["ballast"], "no part is left"


def test_a_policy_that_does_not_fit_is_not_published_until_it_does(small_disk):
    store = LocalStore(small_disk.path / "store", retry=HURRIED)
    tensors = [(f"t{n}", TensorBytes.from_numpy(np.full(40_000, n, dtype=np.float32))) for n in range(4)]

    def publish():
        return publish_policy(
            store,
            PolicyPlace(prefix="p", uid="u", lineage=0, version=1),
            PolicyContents(tensors=tensors, files={}),
            epoch=1,
            shard_bytes=1,
        )

    small_disk.fill(leave_bytes=400_000)
    with pytest.raises(CapacityError):
        publish()
    assert len(list(store.list("p/"))) == 2, "the shards that fitted, which nothing names"
    small_disk.make_room()
    published = publish()
    assert not published.already_existed
    manifest = read_manifest(store, published.manifest_key, published.manifest_sha256)
    assert {name: bytes(t.data) for name, t in pull_tensors(store, manifest).items()} == {
        name: bytes(t.data) for name, t in tensors
    }
    small_disk.fill(leave_bytes=200_000)
    with pytest.raises(CapacityError, match=r"cannot write .*engine"):
        download_hf(store, manifest, small_disk.path / "engine")
    small_disk.make_room()


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    source = "import sys; from pathlib import Path; from millrace.storage.local import LocalStore\n"
    source += "store = LocalStore(Path(sys.argv[1])); store.put_file('k', Path(sys.argv[2]))"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = subprocess.Popen([sys.executable, "-c", source, str(tmp_path / "s"), str(pipe)])
    with pipe.open("wb") as feed:  # opened when the writer begins to read
        feed.write(b"x" * 200_000)
        feed.flush()
        temporary = tmp_path / "s" / ".tmp"
        while not list(temporary.iterdir()):
            time.sleep(0.01)
        (left,) = temporary.iterdir()
        os.utime(left, (time.time() - 120,) * 2)
        LocalStore(tmp_path / "s")
        assert left.exists(), "its writer lives"
        writer.kill()
        writer.wait()
    store = LocalStore(tmp_path / "s")
    assert not left.exists()
    assert list(store.list("")) == [] and store.head("k") is None


def test_a_checkpoint_that_does_not_fit_on_its_way_says_so(small_disk, monkeypatch):
    monkeypatch.setenv(SCRATCH_VARIABLE, str(small_disk.path / "scratch"))
    small_disk.fill(leave_bytes=100_000)
    with owned_directory("checkpoint") as directory, pytest.raises(CapacityError, match="No space left") as caught:
        save_shards({"model.a": torch.zeros(100_000)}, directory / "shards", gang=Gang())
    assert caught.value.reason == "DISK_FULL" and "MILLRACE_SCRATCH_DIR" in str(caught.value)
    assert list((small_disk.path / "scratch").iterdir()) == []
    small_disk.make_room()
    with owned_directory("checkpoint") as directory:
        save_shards({"model.a": torch.zeros(100_000)}, directory / "shards", gang=Gang())
