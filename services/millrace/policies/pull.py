"""Pulls a published policy and proves it: sha256 of every object, then the digest of every tensor."""

import hashlib
import json
import os
from pathlib import Path

from millrace.errors import CorruptObjectError
from millrace.policies.digest import digest_hex, tensor_digest
from millrace.policies.manifest import CODEC_FULL, ObjectEntry, PolicyManifest, TensorEntry, sha256_hex
from millrace.policies.tensors import TensorBytes
from millrace.storage.base import ObjectStore
from millrace.storage.disk import io_errors, make_parent


def read_manifest(store: ObjectStore, key: str, sha256: bytes | None = None) -> PolicyManifest:
    """Reads a manifest; `sha256` (of the policy stream's entry) must match its bytes unless it is None or empty.

    Raises NotFoundError if it does not exist and CorruptObjectError if it is damaged.
    """
    data = store.get(key)
    if sha256 and hashlib.sha256(data).digest() != sha256:
        raise CorruptObjectError(
            f"policy manifest {store.uri(key)} has sha256 {sha256_hex(data)}, announced was {sha256.hex()}",
            reason="POLICY_MANIFEST_HASH_MISMATCH",
            remedy="the object was damaged or replaced; publish the policy again",
        )
    return PolicyManifest.from_bytes(data, source=store.uri(key))


def pull_tensors(store: ObjectStore, manifest: PolicyManifest) -> dict[str, TensorBytes]:
    """Every tensor of the version by name, verified, as views into the downloaded objects."""
    _require_full(manifest)
    by_object: dict[str, list[TensorEntry]] = {}
    for entry in manifest.tensors:
        by_object.setdefault(entry.object, []).append(entry)
    tensors: dict[str, TensorBytes] = {}
    for item in manifest.objects:
        view = memoryview(_get_verified(store, item.key, item.sha256))
        for entry in by_object.get(item.key, []):
            tensors[entry.name] = _verified_tensor(view, entry, source=store.uri(item.key))
    return tensors


def pull_files(store: ObjectStore, manifest: PolicyManifest) -> dict[str, bytes]:
    """The small files of the version (`config.json`, tokenizer, …) by name, verified."""
    return {entry.name: _get_verified(store, entry.key, entry.sha256) for entry in manifest.files}


def download_hf(store: ObjectStore, manifest: PolicyManifest, directory: str | os.PathLike[str]) -> Path:
    """Writes the version as a directory that `AutoModelForCausalLM.from_pretrained` loads; returns the directory."""
    _require_full(manifest)
    target = Path(directory)
    for name, data in pull_files(store, manifest).items():
        _write(target / name, data)
    names = _hf_names(manifest.objects)
    for item in manifest.objects:
        data = _get_verified(store, item.key, item.sha256)
        view = memoryview(data)
        for entry in (e for e in manifest.tensors if e.object == item.key):
            _verified_tensor(view, entry, source=store.uri(item.key))
        _write(target / names[item.key], data)
    if len(manifest.objects) > 1:
        index = {
            "metadata": {"total_size": sum(entry.length_bytes for entry in manifest.tensors)},
            "weight_map": {entry.name: names[entry.object] for entry in manifest.tensors},
        }
        _write(target / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True).encode())
    return target


def _write(path: Path, data: bytes) -> None:
    """One local file; CapacityError if the disk is full."""
    make_parent(path)
    with io_errors(path, "write", needed_bytes=len(data)):
        path.write_bytes(data)


def _hf_names(objects: tuple[ObjectEntry, ...]) -> dict[str, str]:
    """File names that the Hugging Face loaders look for: one file, or numbered shards with an index."""
    if len(objects) == 1:
        return {objects[0].key: "model.safetensors"}
    count = len(objects)
    return {item.key: f"model-{number:05d}-of-{count:05d}.safetensors" for number, item in enumerate(objects, 1)}


def _require_full(manifest: PolicyManifest) -> None:
    """Raises CorruptObjectError for a codec that this version cannot decode."""
    if manifest.codec != CODEC_FULL:
        raise CorruptObjectError(
            f"policy {manifest.lineage}-{manifest.version} has codec {manifest.codec!r}, not {CODEC_FULL!r}",
            reason="POLICY_CODEC_UNKNOWN",
            remedy="upgrade this service, or publish full policies",
        )


def _get_verified(store: ObjectStore, key: str, sha256: str) -> bytes:
    """An object's bytes; CorruptObjectError if their sha256 is not the manifest's."""
    data = store.get(key)
    if (found := sha256_hex(data)) != sha256:
        raise CorruptObjectError(
            f"object {store.uri(key)} has sha256 {found}, its manifest says {sha256}",
            reason="POLICY_OBJECT_HASH_MISMATCH",
            remedy="the object is damaged; the next version replaces it, or publish this one again",
        )
    return data


def _verified_tensor(view: memoryview, entry: TensorEntry, *, source: str) -> TensorBytes:
    """One tensor as a view into its object; CorruptObjectError if its digest is not the manifest's."""
    tensor = TensorBytes(
        dtype=entry.dtype, shape=entry.shape, data=view[entry.offset : entry.offset + entry.length_bytes]
    )
    if (found := digest_hex(tensor_digest(tensor))) != entry.digest:
        raise CorruptObjectError(
            f"tensor {entry.name} in {source} has digest {found}, its manifest says {entry.digest}",
            reason="POLICY_TENSOR_DIGEST_MISMATCH",
            remedy="publish the policy again",
        )
    return tensor
