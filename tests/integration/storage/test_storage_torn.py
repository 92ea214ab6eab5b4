"""Writers die between the data and the manifest: what no manifest names is never read, and a successor commits."""

import os
import subprocess
import sys

import numpy as np
import pytest

from millrace.errors import CorruptObjectError, NotFoundError
from millrace.policies.host_copy import download_hf, pull_tensors, read_manifest
from millrace.policies.manifest import PolicyPlace
from millrace.policies.publish import PolicyContents, PublishedPolicy, publish_policy
from millrace.policies.tensors import TensorBytes
from millrace.storage import ObjectStore
from millrace.storage.s3 import S3Store
from millrace_testing.chaos.fault_proxy import Effect, Fault, FaultProxy

KEY = PolicyPlace(prefix="p", uid="u", lineage=0, version=3).manifest_key
TENSORS = [(f"t{number}", TensorBytes.from_numpy(np.full(20_000, number, dtype=np.float32))) for number in range(3)]
PUBLISH = """
import sys
import numpy as np
from millrace.policies.manifest import PolicyPlace
from millrace.policies.publish import PolicyContents, publish_policy
from millrace.policies.tensors import TensorBytes
from millrace.storage import open_store
tensors = [(f"t{n}", TensorBytes.from_numpy(np.full(20_000, n, dtype=np.float32))) for n in range(3)]
publish_policy(
    open_store(sys.argv[1]), PolicyPlace(prefix="p", uid="u", lineage=0, version=3),
    PolicyContents(tensors=tensors, files={"config.json": b"{}"}), epoch=1, shard_bytes=1,
)
"""


def _publish(store: ObjectStore, *, epoch: int) -> PublishedPolicy:
    files = {"config.json": b"{}"}
    return publish_policy(
        store,
        PolicyPlace(prefix="p", uid="u", lineage=0, version=3),
        PolicyContents(tensors=TENSORS, files=files),
        epoch=epoch,
        shard_bytes=1,
    )


def _kill_publisher_at(proxy: FaultProxy, store: S3Store, fault: Fault) -> None:
    """Start a process that publishes, and SIGKILL it while its request suffers the fault."""
    armed = proxy.add(fault)
    bucket, _, prefix = store.uri("").removeprefix("s3://").rstrip("/").partition("/")
    url = f"s3://{bucket}/{prefix}?endpoint={proxy.endpoint}&region=us-east-1"
    publisher = subprocess.Popen([sys.executable, "-c", PUBLISH, url], env=os.environ)
    try:
        assert armed.hit.wait(60), f"the publisher ended with {publisher.poll()} before it was killed"
    finally:
        publisher.kill()
        publisher.wait()
    proxy.clear()


def _require_whole(store: ObjectStore, published: PublishedPolicy) -> None:
    manifest = read_manifest(store, KEY, published.manifest_sha256)
    assert {n: bytes(t.data) for n, t in pull_tensors(store, manifest).items()} == {
        n: bytes(t.data) for n, t in TENSORS
    }


@pytest.mark.parametrize(
    "fault",
    [
        Fault(effect=Effect.HANG, method="PUT", key="*/model-00002.safetensors"),
        Fault(effect=Effect.TORN_WRITE, method="PUT", key="*/model-00002.safetensors", times=None),
        Fault(effect=Effect.STORE_AND_HANG, method="PUT", key="*/config.json"),
        Fault(effect=Effect.HANG, method="PUT", key="*/manifest.json"),
    ],
    ids=["mid-data", "torn-data", "after-data", "before-manifest"],
)
def test_a_publisher_killed_before_its_manifest_has_published_nothing(proxy: FaultProxy, faulty_store, fault):
    _kill_publisher_at(proxy, faulty_store, fault)
    left = [info.key for info in faulty_store.list("p/")]
    assert left and KEY not in left, "data without a manifest"
    with pytest.raises(NotFoundError):
        read_manifest(faulty_store, KEY)
    published = _publish(faulty_store, epoch=2)
    assert not published.already_existed
    full = published.manifest.full
    assert full is not None and not {entry.key for entry in full.objects} & set(left), "no name is used twice"
    _require_whole(faulty_store, published)


def test_a_publisher_killed_behind_its_manifest_has_published(proxy: FaultProxy, faulty_store):
    fault = Fault(effect=Effect.STORE_AND_HANG, method="PUT", key="*/manifest.json")
    _kill_publisher_at(proxy, faulty_store, fault)
    before = {info.key for info in faulty_store.list("p/")}
    published = _publish(faulty_store, epoch=2)
    assert published.already_existed, "its successor proves the digest and goes on"
    assert {info.key for info in faulty_store.list("p/")} == before, "and uploads nothing"
    _require_whole(faulty_store, published)


def test_bytes_that_were_damaged_on_their_way_never_reach_an_engine(proxy: FaultProxy, faulty_store, tmp_path):
    published = _publish(faulty_store, epoch=1)
    damage = proxy.add(Fault(effect=Effect.DAMAGE_ANSWER, method="GET", key="*.safetensors"))
    with pytest.raises(CorruptObjectError, match="has sha256"):
        pull_tensors(faulty_store, published.manifest)
    with pytest.raises(CorruptObjectError, match="has sha256"):
        download_hf(faulty_store, published.manifest, tmp_path / "engine")
    assert damage.struck == 2 * len(TENSORS) and not list((tmp_path / "engine").glob("*.safetensors"))
    proxy.clear()
    proxy.add(Fault(effect=Effect.DAMAGE_ANSWER, method="GET", key="*/manifest.json"))
    with pytest.raises(CorruptObjectError, match="announced was"):
        read_manifest(faulty_store, KEY, published.manifest_sha256)
