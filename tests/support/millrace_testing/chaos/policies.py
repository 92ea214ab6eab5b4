"""The policies that a run has published, and those that one unbroken training over its log makes."""

import json

from millrace.policies.digest import digest_hex, policy_digest, tensor_digest
from millrace.readers.replay import Replayer
from millrace.runlog import Names
from millrace.storage import ObjectStore


def published(store: ObjectStore, names: Names) -> dict[int, str]:
    """Return the digest of each published version."""
    found: dict[int, str] = {}
    for prefix in store.list_prefixes(names.policies):
        manifest = json.loads(store.get(prefix + "manifest.json"))
        assert manifest["version"] not in found, "a version is published twice"
        found[manifest["version"]] = manifest["digest"]
    return found


def recomputed(store: ObjectStore, names: Names, *, steps: int) -> dict[int, str]:
    """Return the digest of each version that an uninterrupted training over the run's log makes, computed in this
    process.
    """
    digests: dict[int, str] = {}
    with Replayer.open(store, names, step=0) as replayer:
        assert replayer.start == 0
        for version in range(steps + 1):
            if version:
                replayer.advance(replayer.read())
            tensors = replayer.tensors().items()
            digests[version] = policy_digest(
                {name: (tensor.dtype, tensor.shape, digest_hex(tensor_digest(tensor))) for name, tensor in tensors}
            )
    return digests
