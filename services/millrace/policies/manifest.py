"""The manifest of a policy version: the create-only object whose existence is the commit of the version.

A version is a set of tensors and the digests that prove them. How its bytes are stored are its *encodings*, of which
there may be several: `full` holds every tensor, `delta` what differs from an earlier version of the same lineage. Each
gives the same bits, and a reader takes the cheapest that it can use. An encoding is made of pieces, contiguous
row-major ranges of tensors, because every rank of a trainer encodes and uploads what it holds.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, Self

from millrace.decoding import Fields, decode_object, require_file_name, require_integer, require_number
from millrace.errors import CorruptObjectError, InvalidStateError
from millrace.policies.digest import policy_digest
from millrace.policies.tensors import (
    MAX_DIMENSIONS,
    TensorBytes,
    TensorChange,
    TensorPlace,
    element_bytes,
    tensor_bytes,
)
from millrace.storage.base import revision_key

FORMAT = 5
MAX_OBJECT_BYTES = 1 << 40
"""Most bytes of a data object."""
MAX_FILE_BYTES = 1 << 30
"""Most bytes of a small file."""
_MAX_TENSORS, _MAX_OBJECTS, _MAX_FILES, _MAX_ENCODINGS = 1 << 18, 1 << 16, 1000, 100
CODEC_FULL = "full"
CODEC_DELTA = "delta"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPlace:
    """The run, lineage and version of a policy, from which its keys in the store follow."""

    prefix: str
    uid: str
    lineage: int
    version: int

    @property
    def objects_prefix(self) -> str:
        """Return the prefix, ending in `/`, of the keys of all objects of the version."""
        return f"{self.prefix}/runs/{self.uid}/policies/{self.lineage:04d}-{self.version:08d}/"

    @property
    def manifest_key(self) -> str:
        """Return the key of the version's manifest."""
        return f"{self.objects_prefix}manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of the version and the digest of its bits (32 hex)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str

    @property
    def num_elements(self) -> int:
        """Return the number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes of the tensor."""
        return self.num_elements * element_bytes(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectEntry:
    """One data object: its key, the sha256 of its bytes (hex) and its size."""

    key: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of a tensor's elements (`start`, `count`, row-major) and where its bytes are in an object."""

    tensor: str
    start: int
    count: int
    object: str
    offset: int
    length_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """One way to get the version's bits.

    `full`: the pieces are raw little-endian elements and cover every tensor. `delta`: each piece is a frame of
    `delta_codec.py` against the version `base` of the same lineage, whose policy digest is `base_digest`; what has no
    piece did not change.
    """

    codec: str
    base: int | None = None
    base_digest: str | None = None
    objects: tuple[ObjectEntry, ...]
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes of all objects of the encoding, which reading it costs."""
        return sum(entry.size_bytes for entry in self.objects)

    def to_json(self, tensors: Mapping[str, int]) -> dict[str, Any]:
        """Return the encoding as plain data for a manifest, in which a piece is a row of six numbers.

        `tensors` has the index of each tensor in the manifest, by name.
        """
        places = {entry.key: place for place, entry in enumerate(self.objects)}
        return {
            "codec": self.codec,
            "base": self.base,
            "base_digest": self.base_digest,
            "objects": [asdict(entry) for entry in self.objects],
            "pieces": [
                [tensors[p.tensor], p.start, p.count, places[p.object], p.offset, p.length_bytes] for p in self.pieces
            ],
        }

    @classmethod
    def from_json(cls, raw: object, names: tuple[str, ...]) -> "Encoding":
        """Decode an encoding that `to_json` returned; raise ValueError if it is malformed.

        `names` are the manifest's tensors in order.
        """
        fields = Fields(raw, what="an encoding")
        objects = tuple(
            ObjectEntry(
                key=item.key("key"),
                sha256=item.hexadecimal("sha256", num_bytes=32),
                size_bytes=item.integer("size_bytes", most=MAX_OBJECT_BYTES),
            )
            for item in fields.objects("objects", most=_MAX_OBJECTS)
        )
        keys = [entry.key for entry in objects]
        if len(set(keys)) != len(keys):
            raise ValueError("an object is named twice")
        has_base = fields.has("base")
        return cls(
            codec=fields.text("codec", most=100),
            base=fields.integer("base") if has_base else None,
            base_digest=fields.hexadecimal("base_digest", num_bytes=32) if has_base else None,
            objects=objects,
            pieces=tuple(_piece(row, names, keys) for row in fields.items("pieces")),
        )


def _piece(row: object, names: Sequence[str], keys: Sequence[str]) -> Piece:
    """Decode a piece from its row; raise ValueError if it is malformed.

    `names` are the tensors and `keys` the objects that its indices refer to.
    """
    if not isinstance(row, list) or len(row) != 6:
        raise ValueError("a piece is not a row of six numbers")
    tensor, start, count, place, offset, length = (require_integer(n, what="a number of a piece") for n in row)
    if tensor >= len(names) or place >= len(keys):
        raise ValueError(f"a piece is of tensor {tensor} and object {place}, which are not named")
    return Piece(tensor=names[tensor], start=start, count=count, object=keys[place], offset=offset, length_bytes=length)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One small file that an engine needs beside the tensors, such as `config.json`; see `require_file_name`."""

    name: str
    key: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEntry:
    """The version is a LoRA adapter on the policy whose manifest is `base_key`, and whose digest is `base_digest`.

    That is version 0 of the run, except in forks, which have a copy of it. Its weights have `base_bytes`. The adapter's
    tensors have PEFT's names; the other fields are those of `peft.config.AdapterSpec`.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    base_key: str
    base_digest: str
    base_bytes: int


# The proof that an engine serves a policy: the trainer's log-probs, and the context lengths for which they are valid.

_MOST = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The trainer's log-probs on a fixed prompt: `logprobs[i]` is that of `token_ids[i + 1]` after those before.

    `contexts` are the least and the most tokens of the longest sequence of an engine that computes positions as the
    trainer does: only the least where there is no most, and nothing where the model's positions follow no length.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    contexts: tuple[int, ...] = ()

    @classmethod
    def of(cls, fields: Fields) -> Self:
        """Decode the probe of a manifest; raise ValueError if it is malformed."""
        contexts = fields.integers("contexts", most=2)
        if tuple(sorted(contexts)) != contexts:
            raise ValueError(f"the probe's contexts are from {contexts[0]} to {contexts[1]} tokens")
        logprobs = (require_number(value, what="a log-prob") for value in fields.items("logprobs", most=_MOST))
        return cls(token_ids=fields.integers("token_ids", most=_MOST), logprobs=tuple(logprobs), contexts=contexts)

    def require_context(self, length: int) -> None:
        """Raise InvalidStateError (CONTEXT_DIFFERS) if an engine's longest sequence `length` is outside `contexts`."""
        least, most = (*self.contexts, None, None)[:2]
        if (least is None or least <= length) and (most is None or length <= most):
            return
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise InvalidStateError(
            f"the model's positions follow the longest sequence: the trainer computes those of {wanted} tokens, and "
            f"this engine serves {length}",
            reason="CONTEXT_DIFFERS",
            remedy=f"start the engine with {wanted} tokens (inference.model.max_model_len, MILLRACE_MAX_MODEL_LEN, "
            "max_model_len in MILLRACE_VLLM_FLAGS), or write into the run's inference.model.max_model_len what it has",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyManifest:
    """The manifest of a policy version.

    `key` is its own object key. `anchor` is the newest version of the lineage, itself included, with a full encoding.
    `is_delta_base`: later versions may be deltas against this one, so that readers should keep their copy.
    """

    format: int = FORMAT
    key: str
    run_uid: str
    lineage: int
    version: int
    anchor: int
    tensors: tuple[TensorEntry, ...]
    encodings: tuple[Encoding, ...]
    files: tuple[FileEntry, ...]
    digest: str
    probe: Probe | None
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    adapter: AdapterEntry | None = None
    is_delta_base: bool = True

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all data objects of all encodings; small files, which versions share, do not count."""
        return sum(encoding.size_bytes for encoding in self.encodings)

    @property
    def full_bytes(self) -> int:
        """Return the bytes of all tensors uncompressed, and of an adapter's base."""
        base_bytes = 0 if self.adapter is None else self.adapter.base_bytes
        return base_bytes + sum(entry.size_bytes for entry in self.tensors)

    def sibling_key(self, version: int) -> str:
        """Return the key of the first manifest of another version of the same run and lineage."""
        root = revision_key(self.key, 0).removesuffix(f"{self.lineage:04d}-{self.version:08d}/manifest.json")
        return f"{root}{self.lineage:04d}-{version:08d}/manifest.json"

    @property
    def codecs(self) -> str:
        """Return the codecs of its encodings, such as "full", "delta" or "full+delta"; "adapter" for an adapter."""
        if self.adapter is not None:
            return "adapter"
        return "+".join(sorted({encoding.codec for encoding in self.encodings}, key=lambda c: c != CODEC_FULL))

    @property
    def full(self) -> Encoding | None:
        """Return the full encoding; None if the version has only deltas."""
        return next((encoding for encoding in self.encodings if encoding.codec == CODEC_FULL), None)

    @property
    def deltas(self) -> tuple[Encoding, ...]:
        """Return the delta encodings, the one against the oldest version first."""
        found = [encoding for encoding in self.encodings if encoding.codec == CODEC_DELTA]
        return tuple(sorted(found, key=lambda encoding: encoding.base or 0))

    def to_bytes(self) -> bytes:
        """Return the manifest as canonical JSON, so that equal manifests have equal bytes.

        Keys are sorted, and there are no spaces and no NaN.
        """
        places = {entry.name: place for place, entry in enumerate(self.tensors)}
        raw = {
            "format": self.format,
            "key": self.key,
            "run_uid": self.run_uid,
            "lineage": self.lineage,
            "version": self.version,
            "anchor": self.anchor,
            "tensors": [asdict(entry) for entry in self.tensors],
            "encodings": [encoding.to_json(places) for encoding in self.encodings],
            "files": [asdict(entry) for entry in self.files],
            "digest": self.digest,
            "probe": None if self.probe is None else asdict(self.probe),
            "created": self.created,
            "adapter": None if self.adapter is None else asdict(self.adapter),
            "is_delta_base": self.is_delta_base,
        }
        return json.dumps(raw, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> "PolicyManifest":
        """Parse and check a manifest; raise CorruptObjectError if it is damaged or of another format.

        `source` names the object in the error.
        """
        what, reason = f"policy manifest {source}", "POLICY_MANIFEST_INVALID"
        remedy = "the object is damaged or of another version of Millrace: the run's trainer publishes it anew when a "
        remedy += "replica reports it, or read it with the version that wrote it"
        raw = decode_object(data, what=what, reason=reason, remedy=remedy)
        try:
            manifest = _manifest_of(Fields(raw))
            manifest._check()
        except ValueError as error:
            raise CorruptObjectError(f"{what} is not readable: {error}", reason=reason, remedy=remedy) from error
        return manifest

    def _check(self) -> None:
        """Raise ValueError if the parts contradict each other or a file name could leave its directory."""
        names = {require_file_name(entry.name) for entry in self.files}
        if len(names) != len(self.files):
            raise ValueError("a file is named twice")
        if inside := next((name for name in sorted(names) for each in _directories(name) if each in names), None):
            raise ValueError(f"file name {inside!r} is in what is a file itself")
        if self.probe is not None and not all(map(math.isfinite, self.probe.logprobs)):
            raise ValueError("the probe has log-probs that are not finite")
        tensors = {entry.name: entry for entry in self.tensors}
        if len(tensors) != len(self.tensors):
            raise ValueError("a tensor is named twice")
        if whole_digest(self.tensors) != self.digest:
            raise ValueError("the digest of the whole does not follow from the digests of the tensors")
        for encoding in self.encodings:
            # What an encoding of another codec means, only a later release knows; readers leave it out.
            if encoding.codec in (CODEC_FULL, CODEC_DELTA):
                _check_encoding(encoding, tensors, version=self.version)


def _directories(name: str) -> list[str]:
    """Return the directories of a file name with slashes, from the outermost."""
    parts = name.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts))]


def whole_digest(tensors: Iterable[TensorEntry]) -> str:
    """Return the digest (hex) of a version from the entries of its tensors, in any order."""
    return policy_digest({entry.name: (entry.dtype, entry.shape, entry.digest) for entry in tensors})


def _manifest_of(fields: Fields) -> PolicyManifest:
    """Decode a manifest's fields; raise ValueError for one of a wrong type or outside its bounds."""
    if (found := fields.integer("format")) != FORMAT:
        raise ValueError(f"its format is {found} and this version reads {FORMAT}")
    tensors = tuple(_tensor(item) for item in fields.objects("tensors", most=_MAX_TENSORS))
    names = tuple(entry.name for entry in tensors)
    probe, adapter = fields.inner("probe"), fields.inner("adapter")
    return PolicyManifest(
        format=found,
        key=fields.key("key"),
        run_uid=fields.text("run_uid"),
        lineage=fields.integer("lineage"),
        version=fields.integer("version"),
        anchor=fields.integer("anchor"),
        tensors=tensors,
        encodings=tuple(Encoding.from_json(item, names) for item in fields.items("encodings", most=_MAX_ENCODINGS)),
        files=tuple(_file(item) for item in fields.objects("files", most=_MAX_FILES)),
        digest=fields.hexadecimal("digest", num_bytes=32),
        probe=None if probe is None else Probe.of(probe),
        created=fields.text("created"),
        adapter=None if adapter is None else _adapter_of(adapter),
        is_delta_base=not fields.has("is_delta_base") or fields.flag("is_delta_base"),
    )


def _tensor(fields: Fields) -> TensorEntry:
    """Decode the entry of a tensor; raise ValueError if it is malformed."""
    entry = TensorEntry(
        name=fields.text("name"),
        shape=fields.integers("shape", most=MAX_DIMENSIONS),
        dtype=fields.text("dtype", most=100),
        digest=fields.hexadecimal("digest", num_bytes=16),
    )
    tensor_bytes(entry.dtype, entry.shape)
    return entry


def _file(fields: Fields) -> FileEntry:
    """Decode the entry of a small file; raise ValueError if it is malformed."""
    return FileEntry(
        name=fields.text("name", most=200),
        key=fields.key("key"),
        sha256=fields.hexadecimal("sha256", num_bytes=32),
        size_bytes=fields.integer("size_bytes", most=MAX_FILE_BYTES),
    )


def _adapter_of(fields: Fields) -> AdapterEntry:
    """Decode the entry of an adapter; raise ValueError if it is malformed."""
    return AdapterEntry(
        rank=fields.integer("rank", least=1, most=1 << 20),
        alpha=fields.number("alpha"),
        target_modules=fields.texts("target_modules", most=_MAX_TENSORS),
        modules_to_save=fields.texts("modules_to_save", most=_MAX_TENSORS),
        base_key=fields.key("base_key"),
        base_digest=fields.text("base_digest", most=64),
        base_bytes=fields.integer("base_bytes"),
    )


def _check_encoding(encoding: Encoding, tensors: Mapping[str, TensorEntry], *, version: int) -> None:
    """Raise ValueError unless the pieces are in their objects and tensors, disjoint, and cover all if it is full.

    `tensors` are those of version `version`, by name.
    """
    is_full = encoding.codec == CODEC_FULL
    if is_full != (encoding.base is None) or (encoding.base is not None and not encoding.base < version):
        raise ValueError(f"a {encoding.codec} encoding of version {version} has the base {encoding.base}")
    sizes = {entry.key: entry.size_bytes for entry in encoding.objects}
    covered = dict.fromkeys(tensors, 0)
    # In row-major order one running end per tensor shows both overlaps and, in a full copy, gaps.
    for piece in sorted(encoding.pieces, key=lambda piece: (piece.tensor, piece.start)):
        entry = tensors[piece.tensor]
        what = f"elements {piece.start} to {piece.start + piece.count} of tensor {piece.tensor}"
        if piece.start + piece.count > entry.num_elements:
            raise ValueError(f"{what} are more than the {entry.num_elements} that it has")
        if piece.offset + piece.length_bytes > sizes[piece.object]:
            raise ValueError(f"{what} are outside their object {piece.object}")
        if piece.start < covered[piece.tensor] or (is_full and piece.start != covered[piece.tensor]):
            raise ValueError(f"{what} do not follow the piece before, which ends at {covered[piece.tensor]}")
        # Only a full copy's size follows from its elements: deltas are compressed.
        if is_full and piece.length_bytes != piece.count * element_bytes(entry.dtype):
            raise ValueError(f"{what} have {piece.length_bytes} bytes")
        covered[piece.tensor] = piece.start + piece.count
    for name, end in covered.items():
        if is_full and end != tensors[name].num_elements:
            raise ValueError(f"tensor {name} has {tensors[name].num_elements} elements, and its pieces {end}")


def sha256_hex(data: bytes | memoryview) -> str:
    """Return the sha256 of bytes, hex."""
    return hashlib.sha256(data).hexdigest()


# A policy version that is fetched, decoded and verified, ready to be loaded by an engine.
#
# It is between the puller (`host_copy.py`), which reads objects, and an engine, which holds weights in a layout of
# its own. A staged policy holds the whole version, and says which elements changed since the version that the engine
# holds, so that an engine can choose between loading everything and writing only what is new.


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPolicy:
    """One version in host memory, proved against its manifest.

    `tensors` are views of the host copy: they are valid until the next version is staged. `changes` say, by tensor
    name, what differs from the version `base`, a (lineage, version); they are None if that is unknown or everything may
    differ, and a tensor without an entry is unchanged. `path` is a file that holds the same bytes, in the safetensors
    layout that `places` tells, for engines in another process; None if there is none. `fetched_bytes` were read from
    the object store; `full_bytes` is what a full copy has.
    """

    manifest: PolicyManifest
    tensors: Mapping[str, TensorBytes]
    changes: Mapping[str, tuple[TensorChange, ...]] | None = None
    base: tuple[int, int] | None = None
    path: Path | None = None
    places: Mapping[str, TensorPlace] | None = None
    fetched_bytes: int = 0
    full_bytes: int = 0


class Stager(Protocol):
    """Fetches and proves a policy in host memory; `HostCopy` is one. All methods block."""

    def stage(self, manifest_key: str, sha256: bytes | None = None) -> StagedPolicy:
        """Fetch the version with this manifest, and return it, whole and verified.

        `sha256` is that of the manifest as announced; None: it is not compared. After a failure the previous version is
        held, or none.
        """
        ...

    def forget(self) -> None:
        """Discard the held version, so that the next `stage` begins at a full copy."""
        ...

    def drop(self) -> None:
        """Discard the held version, and free its memory or file; raise nothing."""
        ...
