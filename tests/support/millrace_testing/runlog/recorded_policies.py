"""Policy versions of a recorded run, made by the code that trainers publish with: anchors, deltas and shared files."""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from millrace.internal.v1 import policy_pb2
from millrace.policies.manifest import FileEntry, PolicyManifest, PolicyPlace, TensorEntry, whole_digest
from millrace.policies.publish import TensorPart, commit_policy, upload_delta, upload_files, upload_full, upload_prefix
from millrace.policies.share import History
from millrace.runlog.names import Names
from millrace.storage import ObjectStore

ANCHOR_EVERY = 4
_SHAPES = {"a.weight": (40, 30), "b.weight": (50,)}


@dataclass
class Publisher:
    """Publishes version after version of one lineage; `seed` changes all weights."""

    store: ObjectStore
    names: Names
    lineage: int = 0
    seed: int = 0
    _history: History = field(default_factory=lambda: History(skip_deltas=(4,), threads=1))
    _files: tuple[FileEntry, ...] = ()
    _anchor: int = 0

    def publish(self, version: int) -> policy_pb2.PolicyEntry:
        """Upload and commit a version: an anchor at the start and at every fourth, deltas where they fit."""
        store, names = self.store, self.names
        parts = self.parts(version)
        if not self._files:
            files = {"config.json": b'{"vocab_size": %d}' % (9 - self.seed)}
            self._files = upload_files(store, prefix=names.prefix, uid=names.uid, epoch=1, files=files)
        base = upload_prefix(
            PolicyPlace(prefix=names.prefix, uid=names.uid, lineage=self.lineage, version=version), epoch=1
        )
        encodings, fits = [], self._history.fits(parts, version)
        digests = self._history.digests(parts, version)
        if not fits or version % ANCHOR_EVERY == 0:
            self._anchor = version
            encodings.append(upload_full(store, base, parts))
        if fits:
            encodings += [
                upload_delta(store, base, delta.frames, against=delta.base, against_digest=delta.base_digest)
                for delta in (self._history.encode(parts)[0], *self._history.encode_skips(parts, version))
            ]
        tensors = tuple(
            TensorEntry(name=part.name, shape=part.shape, dtype=part.dtype, digest=f"{digests[part.name]:032x}")
            for part in parts
        )
        key = names.policy_manifest(self.lineage, version)
        manifest = PolicyManifest(
            key=key,
            lineage=self.lineage,
            version=version,
            anchor=self._anchor,
            tensors=tensors,
            encodings=tuple(encodings),
            files=self._files,
            probe=None,
            run_uid=names.uid,
            digest=whole_digest(tensors),
        )
        published = commit_policy(store, key, manifest)
        self._history.advance(parts, version=version, digest=whole_digest(tensors), digests=digests)
        return policy_pb2.PolicyEntry(
            lineage=self.lineage,
            version=version,
            manifest_key=key,
            manifest_sha256=published.manifest_sha256,
            digest=manifest.digest,
        )

    def parts(self, version: int) -> list[TensorPart]:
        """Return the weights of which some differ from version to version."""
        parts = []
        for name, shape in _SHAPES.items():
            bits = np.random.default_rng([self.seed, len(name)]).integers(0, 1 << 16, shape, np.uint16).reshape(-1)
            for step in range(version):
                rng = np.random.default_rng([self.seed, step, self.lineage])
                bits[rng.integers(0, bits.size, 3)] ^= 1
            parts.append(TensorPart(name=name, dtype="bfloat16", shape=shape, start=0, bits=bits))
        return parts


def manifest_sha256(entry: policy_pb2.PolicyEntry) -> str:
    """Return the SHA-256 of an entry's manifest, as events have it."""
    return entry.manifest_sha256.hex()


def sha256(data: bytes) -> str:
    """Return the SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()
