"""What a clean log looks like, checked without the product's own audit: headers, ordinals, versions."""

import json
from collections import Counter
from types import SimpleNamespace

from millrace.internal.v1 import batch_pb2
from millrace.runlog.names import Names
from millrace.storage import ObjectStore


def check_by_hand(store: ObjectStore, *, prefix: str, uid: str) -> SimpleNamespace:
    """AssertionError unless every step, ordinal and version is there once; returns a few numbers."""
    names = Names(prefix, uid)
    batches = sorted(item.key for item in store.list(names.batches))
    headers = [batch_pb2.BatchHeader.FromString(store.get(key)) for key in batches if key.endswith(".pb")]
    assert [header.step for header in headers] == list(range(len(headers))), "gapless steps"
    resolved = Counter(item.ordinal for header in headers for item in header.resolutions)
    assert max(resolved.values()) == 1, f"resolved twice: {[o for o, n in resolved.items() if n > 1]}"
    assert sorted(resolved) == list(range(len(resolved))), "no ordinal is lost"
    manifests = [item.key for item in store.list(names.policies) if item.key.endswith("/manifest.json")]
    versions = [json.loads(store.get(key))["version"] for key in manifests]
    assert sorted(versions) == list(range(len(headers))), f"every version was published once: {versions}"
    epochs = {header.writer_epoch for header in headers}
    return SimpleNamespace(num_steps=len(headers) - 1, num_ordinals=len(resolved), num_epochs=len(epochs))
