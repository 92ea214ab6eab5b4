"""A stored policy is damaged while a run goes on: the trainer that has its weights publishes it anew, by itself."""

import time

import pytest

from millrace.policies.fetch import damage_of, prove_policies
from millrace.policies.host_copy import read_manifest
from millrace.policies.manifest import PolicyManifest
from millrace.runlog.names import Names
from millrace.storage import ObjectStore
from millrace_testing.chaos.run import WAITS_S, ChaosRun
from millrace_testing.chaos.stack import PREFIX, ChaosStack

pytestmark = pytest.mark.long


def newest_policy(store: ObjectStore, run: ChaosRun) -> PolicyManifest:
    """Return the version that a replica that has nothing is told to serve."""
    names = Names(PREFIX, run.uid)
    found = (prefix for prefix in store.list_prefixes(names.policies) if store.head(f"{prefix}manifest.json"))
    versions = [int(prefix.rstrip("/").rpartition("-")[2]) for prefix in found]
    return read_manifest(store, names.policy_manifest(0, max(versions)))


def wait_let_go(store: ObjectStore, run: ChaosRun) -> PolicyManifest:
    """Return the newest version once the trainer has let go of the paused run: then it saves its only checkpoint."""
    ends = time.monotonic() + WAITS_S
    names = Names(PREFIX, run.uid)
    while store.head(names.checkpoint_manifest((newest := newest_policy(store, run)).version)) is None:
        assert time.monotonic() < ends, run.describe()
        time.sleep(0.1)
    return newest


def flip(store: ObjectStore, key: str) -> bytes:
    """Return change one bit of an object; returns what is there now."""
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))
    return bytes(data)


def test_a_policy_that_is_damaged_in_the_store_is_published_anew(chaos: ChaosStack) -> None:
    run = chaos.submit(max_steps=8, **{"ckpt.interval": 100})
    run.wait_step(2)
    run.pause()
    store = chaos.store()
    policy = wait_let_go(store, run)
    objects = [entry.key for encoding in policy.encodings for entry in encoding.objects]
    damaged = {key: flip(store, key) for key in objects}
    pid = chaos.pid("inference")
    chaos.kill("inference")  # its successor has to read the version
    chaos.wait_restarted("inference", pid)
    run.resume()
    report = chaos.finish(run)

    assert sorted(set(run.steps())) == list(range(8)) and report.is_closed
    anew = [message for reason, message in run.warnings() if reason == "POLICY_PUBLISHED_ANEW"]
    failed = [message for reason, message in run.warnings() if reason == "POLICY_UPDATE_FAILED"]
    name = f"{policy.lineage}-{policy.version}"
    # The one that was damaged, or one that came since and is a difference to it.
    assert any("could not take policy" in message and any(key in message for key in objects) for message in failed)
    assert any(f"policy {name} was damaged" in message for message in anew), anew
    again = read_manifest(store, policy.key)
    assert again.key.endswith("manifest.r1.json") and again.digest == policy.digest
    assert damage_of(store, policy.key, digest=policy.digest) is None
    assert {key: store.get(key) for key in objects} == damaged, "what is damaged stays where it was"
    noted = [note.check for note in report.notes]
    assert "POLICY_REPAIRED" in noted, noted
    names = Names(PREFIX, run.uid)
    keys = [names.policy_manifest(0, version) for version in range(9)]
    assert list(prove_policies(store, keys)) == []
