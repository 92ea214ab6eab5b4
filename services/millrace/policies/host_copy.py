"""The host copy of a policy: the newest version that was fetched, in host memory or in one file, always verified.

    stage ──▶ chain (deltas from what is held, or from an anchor) ──▶ read in parallel, sha256 ──▶ decode ──▶ digests
          ──▶ and only then write

Memory: the full copy (2 bytes per bf16 parameter, 4 per float32), in the file instead if there is one, and while a
version is staged what is read for it: the chain's deltas and their decoded changes, some percent of a full copy at RL
learning rates, up to one more copy where every weight changes. A failure leaves the copy as it was, or empty, or at an
anchor: never mixed.
"""

import logging
import mmap
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millrace.decoding import decode_object
from millrace.errors import ConflictError, CorruptObjectError, MillraceError, NotFoundError
from millrace.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_small_files
from millrace.policies.delta_codec import decode_piece
from millrace.policies.delta_frame import read_header
from millrace.policies.digest import change_digest, decode_threads, digest_hex, tensor_digests
from millrace.policies.fetch import (
    Chain,
    Link,
    Manifests,
    find_chain,
    pull_files,
    read_manifest,
    read_objects,
    require_sizes,
)
from millrace.policies.manifest import ObjectEntry, Piece, PolicyManifest, StagedPolicy, TensorEntry
from millrace.policies.peft.config import parse_peft_config
from millrace.policies.peft.merging import merge_tensors
from millrace.policies.peft.plan import describe_base, plan_merge
from millrace.policies.publish import write_file, write_hf
from millrace.policies.tensors import (
    TensorBytes,
    TensorChange,
    TensorPlace,
    bits_type,
    pack_safetensors,
    plan_safetensors,
)
from millrace.storage.base import ObjectStore
from millrace.storage.clean_up import remove
from millrace.storage.scratch import SCRATCH_VARIABLE, io_errors, make_parent
from millrace.telemetry import faults
from millrace.telemetry.faults import Point

logger = logging.getLogger(__name__)

FILE_NAME = "policy.safetensors"
_MAX_WAYS = 4  # chains that are tried for one version

Bits = NDArray[np.unsignedinteger]
Changes = dict[str, tuple[TensorChange, ...]]
Parts = dict[tuple[int, int], int]


class _Buffer:
    """Memory in the layout of a safetensors file, for tensors of known names, dtypes and shapes."""

    def __init__(self, tensors: tuple[TensorEntry, ...], path: Path | None) -> None:
        """Allocate memory for these tensors, in the file `path` if it is not None, and write the file's header."""
        head, places, size = plan_safetensors((entry.name, entry.dtype, entry.shape) for entry in tensors)
        self.path = path
        self.places: dict[str, TensorPlace] = {place.name: place for place in places}
        self.layout = layout_of(tensors)
        self.data = _map_file(path, size) if path is not None else np.empty(size, np.uint8)
        self.data[: len(head)] = np.frombuffer(head, np.uint8)

    def bits(self, name: str) -> Bits:
        """Return the flat bits of the tensor `name`, a writable view."""
        place = self.places[name]
        return self.data[place.offset : place.offset + place.length_bytes].view(bits_type(place.dtype))

    def tensors(self) -> dict[str, TensorBytes]:
        """Return every tensor by name, as read-only views."""
        return {
            name: TensorBytes(
                dtype=place.dtype,
                shape=place.shape,
                data=self.data[place.offset : place.offset + place.length_bytes].data.toreadonly(),
            )
            for name, place in self.places.items()
        }


@dataclass(slots=True, kw_only=True)
class _Held:
    """The content of the copy: all of `manifest`, with the digests of its tensors, and of parts that came by deltas.

    `parts` are disjoint ranges of each tensor, by start and count, with their digests: a part with a known digest need
    not be digested again for its next delta.
    """

    manifest: PolicyManifest
    buffer: _Buffer
    digests: dict[str, int]
    parts: dict[str, Parts]


class HostCopy:
    """The copy of one policy on this host. Not thread-safe.

    `directory` gets the file `policy.safetensors`, for engines in other processes; None: host memory. A file that an
    earlier process left there is not used.
    """

    def __init__(self, store: ObjectStore, *, directory: Path | None = None) -> None:
        """Begin without a policy. `directory` gets the copy as a file, for engines in other processes; None: host
        memory.

        A file that an earlier process left there is not used.
        """
        self._store = store
        self._path = None if directory is None else directory / FILE_NAME
        self._manifests = Manifests(store)
        self._held: _Held | None = None
        self._spare: _Buffer | None = None

    @property
    def held(self) -> PolicyManifest | None:
        """Return the manifest of the version that the copy holds; None if it is empty."""
        return None if self._held is None else self._held.manifest

    def stage(self, manifest_key: str, sha256: bytes | None = None) -> StagedPolicy:
        """Update the copy to the version with this manifest, and return it, verified. Blocking: call it in a thread.

        `sha256` is that of the manifest as announced; None: it is not compared. If objects are damaged, other chains to
        the version are tried. Raises CorruptObjectError or NotFoundError if no chain can be read, and UnavailableError
        if the store does not answer.
        """
        while True:
            # At most two tries: with the cached manifests, then with newer revisions of them.
            reread_before = self._manifests.rereads
            try:
                staged = self.stage_manifest(self._manifests.read(manifest_key, sha256))
            except (CorruptObjectError, NotFoundError):
                # The version may have been published again under another key: the next try looks for that.
                self._manifests.forget()
                if reread_before:
                    raise
            else:
                self._manifests.trust_cache()
                return staged

    def stage_manifest(self, manifest: PolicyManifest) -> StagedPolicy:
        """Update the copy to the version of a manifest that has been read and verified, and return it, verified.

        Blocking. A copy of another run, or with other tensors, is discarded first. Raises CorruptObjectError or
        NotFoundError if no chain of objects to the version can be read, UnavailableError if the store does not answer.
        """
        if self._held is not None and (
            self._held.manifest.run_uid != manifest.run_uid or self._held.buffer.layout != layout_of(manifest.tensors)
        ):
            self.forget()
        before = self._held
        fetched = _Fetched()
        changes = self._update_to(manifest, fetched)
        held = self._held
        assert held is not None
        return StagedPolicy(
            manifest=manifest,
            tensors=held.buffer.tensors(),
            changes=changes if before is not None else None,
            base=None if before is None or changes is None else (before.manifest.lineage, before.manifest.version),
            path=held.buffer.path,
            places=held.buffer.places,
            fetched_bytes=fetched.num_bytes,
            full_bytes=manifest.full_bytes,
        )

    def forget(self) -> None:
        """Discard the copy, so that the next version is read from its anchor on; keep memory or file for reuse."""
        if self._held is not None:
            self._spare, self._held = self._held.buffer, None

    def drop(self) -> None:
        """Discard the copy, and free its memory or file; views of it, and processes that map it, keep it meanwhile."""
        self.forget()
        self._spare = None
        if self._path is not None:
            remove(self._path, what="policy file")

    def _update_to(self, manifest: PolicyManifest, fetched: "_Fetched") -> Changes | None:
        """Try chains until one leads to `manifest`; return the changes by tensor since the previous copy.

        None if these are unknown, because the copy was empty or was replaced. Counts bytes in `fetched`.
        """
        avoid: set[tuple[str, int | None]] = set()
        first: MillraceError | None = None
        is_continued = True
        while True:
            # A failure has one of three causes: the held copy (all objects have their sha256, and the deltas do not
            # fit), a damaged object (its link is avoided from now on), or nothing that another chain could help.
            before = self._held
            try:
                chain = find_chain(self._manifests, manifest, held=self.held, avoid=avoid)
                if chain and chain[0].encoding.base is None:
                    is_continued = False
                    self._load(chain[0], fetched)
                    chain = chain[1:]
                changes = self._advance(manifest, chain, fetched)
            except (CorruptObjectError, NotFoundError, ConflictError) as error:
                # The objects have their sha256, so the held copy is what may be damaged.
                if is_continued and fetched.is_read:
                    self.forget()
                    first, is_continued, fetched.link = first or error, False, None
                    logger.warning(
                        "a policy delta does not fit the held copy, which may be damaged; beginning anew at an anchor",
                        extra={"lineage": manifest.lineage, "version": manifest.version, "error": str(error)},
                    )
                    continue
                damaged = fetched.link
                if damaged is None or damaged.name in avoid or len(avoid) == _MAX_WAYS - 1:
                    raise first or error from error
                first = first or error
                avoid.add(damaged.name)
                fetched.link = None
                logger.warning(
                    "part of a policy is damaged; looking for another way to it",
                    extra={"lineage": manifest.lineage, "version": manifest.version, "error": str(error)},
                )
            else:
                return changes if is_continued and before is not None else None

    def _load(self, link: Link, fetched: "_Fetched") -> None:
        """Replace the copy by the version of a full encoding, verified; counts bytes in `fetched`.

        The old version is discarded first, so that one copy's memory is enough.
        """
        self.forget()
        fetched.link, fetched.is_read, manifest = link, False, link.manifest
        require_sizes(self._store, link.encoding.objects)
        buffer, self._spare = self._spare, None
        if buffer is None or buffer.layout != layout_of(manifest.tensors):
            # Frees its memory before the new buffer is allocated.
            del buffer
            buffer = _Buffer(manifest.tensors, self._path)
        try:
            _read_full(self._store, link, buffer, fetched)
            faults.reach(Point.INFERENCE_MID_DOWNLOAD, version=manifest.version)
            digests = _prove(manifest, buffer.bits, source=self._store.uri(manifest.key))
        finally:
            self._spare = buffer
        self._spare = None
        fetched.link = None
        self._held = _Held(manifest=manifest, buffer=buffer, digests=digests, parts={})

    def _advance(self, target: PolicyManifest, chain: Chain, fetched: "_Fetched") -> Changes:
        """Apply the deltas of a chain, the last of which leads to `target`; return the changes by the tensor's name.

        Tensors in which nothing changed have no entry. All deltas are read, decoded and verified before the first
        element is written. Counts bytes in `fetched`, and sets the link that is read there.
        """
        held = self._held
        assert held is not None
        frames: dict[str, list[tuple[Link, Piece, memoryview]]] = {}
        fetched.is_read = False
        for link in chain:
            fetched.link = link
            objects = _read_whole(self._store, link, fetched)
            faults.reach(Point.INFERENCE_MID_DOWNLOAD, version=target.version)
            for piece in sorted(link.encoding.pieces, key=lambda piece: (piece.tensor, piece.start)):
                view = objects[piece.object][piece.offset : piece.offset + piece.length_bytes]
                # The deltas of a chain are collected by tensor, so that tensors can be rebuilt in parallel.
                frames.setdefault(piece.tensor, []).append((link, piece, view))
        fetched.is_read = True
        changes: Changes = {}
        # Copies: what is held stays as it is until everything is proved.
        digests, parts = dict(held.digests), dict(held.parts)
        with ThreadPoolExecutor(decode_threads(), thread_name_prefix="policy-decode") as pool:
            rebuilding = {
                name: pool.submit(
                    _rebuild, held.buffer.bits(name), held.digests[name], held.parts.get(name, {}), items, fetched
                )
                for name, items in frames.items()
            }
            for name, future in rebuilding.items():
                changes[name], digests[name], parts[name] = future.result()
        # All proofs come before the first write: a bad delta leaves the held version whole.
        for entry in target.tensors:
            if digest_hex(digests[entry.name]) != entry.digest:
                raise _digest_mismatch(entry, digest_hex(digests[entry.name]), source=self._store.uri(target.key))
        fetched.link = None
        for name, found in changes.items():
            for change in found:
                change.apply(held.buffer.bits(name))
        self._held = _Held(manifest=target, buffer=held.buffer, digests=digests, parts=parts)
        # Tensors without any changed element need no write in an engine.
        return {name: found for name, found in changes.items() if any(change.num_elements for change in found)}


class _Fetched:
    """Bytes read so far, and the current link, which is avoided if it fails.

    `is_read`: all objects of the deltas were read and have their sha256, so that only the held copy can be wrong.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.link: Link | None = None
        self.is_read = False


def layout_of(tensors: tuple[TensorEntry, ...]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Return (name, dtype, shape) of each tensor: two versions fit into the same buffer if these are equal."""
    return tuple((entry.name, entry.dtype, entry.shape) for entry in tensors)


def _rebuild(
    bits: Bits,
    digest: int,
    parts: Mapping[tuple[int, int], int],
    items: list[tuple[Link, Piece, memoryview]],
    fetched: _Fetched,
) -> tuple[tuple[TensorChange, ...], int, Parts]:
    """Decode consecutive deltas (`items`) of a tensor, without writing to `bits`, the tensor's flat bits.

    Returns the changes to make, the tensor's digest after them, and the digests of parts by (start, count). `digest`
    and `parts` are those before. A link whose delta is damaged is put into `fetched`, and the error raised.
    """
    is_chain = len({link.name for link, _, _ in items}) > 1
    now = bits.copy() if is_chain else bits
    # Of several deltas in a row each needs the result of the one before, and `bits` must stay as they are until all is
    # proved.
    changes: list[TensorChange] = []
    after: Parts = dict(parts)
    for link, piece, frame in items:
        part = (piece.start, piece.count)
        is_whole = piece.count == now.size
        known = digest if is_whole else after.get(part)
        current = now[piece.start : piece.start + piece.count]
        try:
            change = decode_piece(frame, current, start=piece.start, current_digest=known)
            # Decoding has proved that the part has this digest now.
            result = read_header(frame).digest
        except MillraceError:
            fetched.link = link
            raise
        digest = result if is_whole else change_digest(digest, change, change.old_bits(now))
        if is_whole:
            after.clear()
        else:
            _note_part(after, part, result)
        changes.append(change)
        if is_chain:
            change.apply(now)
    if not is_chain:
        return tuple(changes), digest, after
    # An element may have changed twice, or back: what an engine writes is the difference of both ends.
    positions = np.flatnonzero(bits != now)
    return (TensorChange(bits=now[positions], positions=positions),), digest, after


def _note_part(parts: Parts, part: tuple[int, int], digest: int) -> None:
    """Record the digest of a part (start, count) in `parts`, and remove parts that share elements with it."""
    # The tensor was cut otherwise before: by another number of ranks, or by one that held all of it.
    if part not in parts:
        start, end = part[0], part[0] + part[1]
        for other in [other for other in parts if other[0] < end and start < other[0] + other[1]]:
            del parts[other]
    parts[part] = digest


def _read_full(store: ObjectStore, link: Link, buffer: _Buffer, fetched: _Fetched) -> None:
    """Read the objects of a full encoding into `buffer`, verifying each object's sha256, but not the tensors' digests.

    Adds the bytes read to `fetched`.
    """
    pieces: dict[str, list[Piece]] = {}
    for piece in link.encoding.pieces:
        pieces.setdefault(piece.object, []).append(piece)

    def take(entry: ObjectEntry, offset: int, data: bytes) -> None:
        """Copy bytes of an object from `offset` on to the tensors that they belong to."""
        fetched.num_bytes += len(data)
        source = np.frombuffer(data, np.uint8)
        for piece in pieces.get(entry.key, []):
            # A download's piece may cut across tensors, and a tensor across pieces: copy what they have in common.
            begin, end = max(offset, piece.offset), min(offset + len(data), piece.offset + piece.length_bytes)
            if begin < end:
                place = buffer.places[piece.tensor]
                width = bits_type(place.dtype).itemsize
                at = place.offset + piece.start * width + begin - piece.offset
                buffer.data[at : at + end - begin] = source[begin - offset : end - offset]

    read_objects(store, link.encoding.objects, take)


def _read_whole(store: ObjectStore, link: Link, fetched: _Fetched) -> dict[str, memoryview]:
    """Return the objects of a delta by key, verified by their sha256; count bytes in `fetched`."""
    require_sizes(store, link.encoding.objects)
    buffers = {entry.key: bytearray(entry.size_bytes) for entry in link.encoding.objects}

    def take(entry: ObjectEntry, offset: int, data: bytes) -> None:
        fetched.num_bytes += len(data)
        buffers[entry.key][offset : offset + len(data)] = data

    read_objects(store, link.encoding.objects, take)
    return {key: memoryview(data) for key, data in buffers.items()}


def _prove(manifest: PolicyManifest, bits: Callable[[str], Bits], *, source: str) -> dict[str, int]:
    """Return the digests of all the manifest's tensors; raise CorruptObjectError if one is not the manifest's.

    `bits` returns a tensor's flat bits by name, and `source` names the policy in the error.
    """
    digests = tensor_digests({entry.name: bits(entry.name) for entry in manifest.tensors})
    for entry in manifest.tensors:
        if digest_hex(digests[entry.name]) != entry.digest:
            raise _digest_mismatch(entry, digest_hex(digests[entry.name]), source=source)
    return digests


def _digest_mismatch(entry: TensorEntry, found: str, *, source: str) -> CorruptObjectError:
    """Make the error that a tensor has the digest `found` instead of its entry's; `source` names the policy."""
    return CorruptObjectError(
        f"tensor {entry.name} of {source} has digest {found}, its manifest says {entry.digest}",
        reason="POLICY_TENSOR_DIGEST_MISMATCH",
        remedy="publish the policy again",
    )


def _map_file(path: Path, size: int) -> NDArray[np.uint8]:
    """Replace the file at `path` by a new one of `size` bytes, and return it mapped.

    Raises CapacityError if the disk has no room, because a later write would end the process.
    """
    make_parent(path, setting=SCRATCH_VARIABLE)
    with io_errors(path, "write", needed_bytes=size, setting=SCRATCH_VARIABLE):
        # A new file and not the old one truncated: processes that still map the old one keep it.
        path.unlink(missing_ok=True)
        # Allocated at once: on a full disk a write to a mapped page without a block is SIGBUS.
        with path.open("x+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)


# A policy version as tensors or as a directory, whatever its encodings; every byte is proved.


def pull_tensors(store: ObjectStore, manifest: PolicyManifest) -> Mapping[str, TensorBytes]:
    """Read the version from the store, whatever its encodings, and return every tensor by name, verified, in memory."""
    return HostCopy(store).stage_manifest(manifest).tensors


def download_hf(store: ObjectStore, manifest: PolicyManifest, directory: str | os.PathLike[str]) -> Path:
    """Write the version as a directory that `AutoModelForCausalLM.from_pretrained` loads; return the directory.

    An adapter becomes one that PEFT and vLLM load on top of its base, with tokenizer and generation config.
    """
    files, tensors = dict(pull_files(store, manifest)), pull_tensors(store, manifest)
    # The base of a run that trains adapters has this file, too.
    config = files.pop(ADAPTER_CONFIG, None)
    if manifest.adapter is None or config is None:
        return write_hf(files, tensors, directory)
    target = Path(directory)
    for name, data in adapter_small_files(files).items():
        write_file(target / name, data)
    write_file(target / ADAPTER_CONFIG, config)
    write_file(target / ADAPTER_WEIGHTS, pack_safetensors(tensors.items())[0])
    return target


def download_merged(store: ObjectStore, manifest: PolicyManifest, directory: str | os.PathLike[str]) -> Path:
    """Write the version as a directory that `AutoModelForCausalLM.from_pretrained` loads, and return the directory.

    An adapter is merged into its base, which is read from the store, too: the result is a whole model, which needs no
    PEFT.
    """
    if manifest.adapter is None:
        return download_hf(store, manifest, directory)
    config = dict(pull_files(store, manifest))[ADAPTER_CONFIG]
    source = f"version {manifest.version}"
    base = read_manifest(store, manifest.adapter.base_key)
    files = {name: data for name, data in pull_files(store, base).items() if name != ADAPTER_CONFIG}
    peft, adapter = parse_peft_config(config, source=source), pull_tensors(store, manifest)
    tensors = pull_tensors(store, base)
    described = decode_object(
        files["config.json"], what=f"config.json of {source}", reason="MODEL_CORRUPT", allows_infinity=True
    )
    model = describe_base(described, tensors)
    plan = plan_merge(peft, adapter, model, source=source)
    return write_hf(files, merge_tensors(peft, plan, adapter, tensors, model=model, source=source), directory)
