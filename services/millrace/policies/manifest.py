"""The manifest of a policy version: the create-only object whose existence is the commit of the version."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass

from millrace.errors import CorruptObjectError
from millrace.policies.digest import policy_digest

FORMAT = 1
CODEC_FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor: where its bytes lie (`offset` from the first byte of object `object`) and its digest (32 hex)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    object: str
    offset: int
    length_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectEntry:
    """One data object: its key, the sha256 of its bytes (hex) and its size."""

    key: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One small file that an engine needs beside the tensors, such as `config.json` or `tokenizer.json`."""

    name: str
    key: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The trainer's log-probs on a fixed prompt: `logprobs[i]` is that of `token_ids[i + 1]` after those before."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyManifest:
    """What a policy version is made of. `base` names the version that a delta is against; None for codec `full`."""

    format: int
    run_uid: str
    lineage: int
    version: int
    base: int | None
    codec: str
    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...]
    files: tuple[FileEntry, ...]
    digest: str
    probe: Probe | None
    created: str

    @property
    def size_bytes(self) -> int:
        """Bytes of all data objects and files."""
        return sum(entry.size_bytes for entry in (*self.objects, *self.files))

    def to_bytes(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, no NaN, so that equal manifests have equal bytes."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> "PolicyManifest":
        """Parses and checks a manifest; raises CorruptObjectError naming `source` if it is damaged or too new."""
        try:
            raw = json.loads(data)
            if raw["format"] != FORMAT:
                raise ValueError(f"its format is {raw['format']} and this version reads {FORMAT}")
            probe = raw["probe"]
            manifest = cls(
                format=raw["format"],
                run_uid=raw["run_uid"],
                lineage=raw["lineage"],
                version=raw["version"],
                base=raw["base"],
                codec=raw["codec"],
                tensors=tuple(TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in raw["tensors"]),
                objects=tuple(ObjectEntry(**entry) for entry in raw["objects"]),
                files=tuple(FileEntry(**entry) for entry in raw["files"]),
                digest=raw["digest"],
                probe=None if probe is None else Probe(**{key: tuple(value) for key, value in probe.items()}),
                created=raw["created"],
            )
            manifest._check()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptObjectError(
                f"policy manifest {source} is not readable: {error}",
                reason="POLICY_MANIFEST_INVALID",
                remedy="the object is damaged or written by a newer version; publish the policy again or upgrade",
            ) from error
        return manifest

    def _check(self) -> None:
        """Raises ValueError if the parts contradict each other or a file name could leave its directory."""
        keys = {entry.key for entry in self.objects}
        for entry in self.tensors:
            if entry.object not in keys:
                raise ValueError(f"tensor {entry.name} lies in {entry.object}, which is not among the objects")
        for entry in self.files:
            if not entry.name or "/" in entry.name or "\\" in entry.name or entry.name.startswith("."):
                raise ValueError(f"file name {entry.name!r} is not a plain name")
        if self.probe is not None and not all(map(math.isfinite, self.probe.logprobs)):
            raise ValueError("the probe has log-probs that are not finite")
        named = {entry.name: (entry.dtype, entry.shape, entry.digest) for entry in self.tensors}
        if len(named) != len(self.tensors):
            raise ValueError("a tensor is named twice")
        if self.codec == CODEC_FULL and policy_digest(named) != self.digest:
            raise ValueError("the digest of the whole does not follow from the digests of the tensors")


def manifest_key(prefix: str, uid: str, *, lineage: int, version: int) -> str:
    """Object key of a policy version's manifest."""
    return f"{policy_prefix(prefix, uid, lineage=lineage, version=version)}manifest.json"


def policy_prefix(prefix: str, uid: str, *, lineage: int, version: int) -> str:
    """Prefix of every object of a policy version, ending in `/`."""
    return f"{prefix}/runs/{uid}/policies/{lineage:04d}-{version:08d}/"


def sha256_hex(data: bytes | memoryview) -> str:
    """sha256 of an object's bytes, hex."""
    return hashlib.sha256(data).hexdigest()
