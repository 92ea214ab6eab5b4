"""Publish, pull, republish, damage: the manifest commits a version and every byte is proven."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from millrace.errors import ConflictError, CorruptObjectError, NotFoundError
from millrace.policies.host_copy import download_hf, pull_files, pull_tensors, read_manifest, write_hf
from millrace.policies.manifest import PolicyManifest, PolicyPlace, Probe
from millrace.policies.publish import PolicyContents, PublishedPolicy, publish_policy, upload_files
from millrace.policies.tensors import TensorBytes, pack_safetensors, read_places
from millrace.storage.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def _tensors(seed: int = 0) -> list[tuple[str, TensorBytes]]:
    rng = np.random.default_rng(seed)
    bf16 = rng.integers(0, 2**16, size=(5, 3)).astype(np.uint16)
    return [
        ("model.embed", TensorBytes.from_numpy(rng.standard_normal((7, 4)).astype(np.float32))),
        ("model.layer", TensorBytes.from_numpy(bf16, dtype="bfloat16")),
        ("scalar", TensorBytes.from_numpy(np.array(3.0, dtype=np.float32))),
    ]


def _publish(
    store: LocalStore,
    *,
    seed: int = 0,
    epoch: int = 1,
    shard_bytes: int = 1 << 30,
    files: Mapping[str, bytes] | None = None,
) -> PublishedPolicy:
    return publish_policy(
        store,
        PolicyPlace(prefix="p", uid="u", lineage=0, version=3),
        PolicyContents(
            tensors=_tensors(seed),
            files=files or {"config.json": b"{}"},
            probe=Probe(token_ids=(1, 2, 3), logprobs=(-0.5, -1.25)),
        ),
        epoch=epoch,
        shard_bytes=shard_bytes,
    )


@pytest.mark.parametrize("shard_bytes", [1 << 30, 1])
def test_pull_gives_back_what_was_published(store: LocalStore, tmp_path: Path, shard_bytes: int) -> None:
    published = _publish(store, shard_bytes=shard_bytes)
    assert published.manifest_key == "p/runs/u/policies/0000-00000003/manifest.json"
    manifest = read_manifest(store, published.manifest_key, published.manifest_sha256)
    assert manifest == published.manifest
    assert manifest.probe == Probe(token_ids=(1, 2, 3), logprobs=(-0.5, -1.25))
    pulled = pull_tensors(store, manifest)
    assert {n: (t.dtype, t.shape, bytes(t.data)) for n, t in pulled.items()} == {
        n: (t.dtype, t.shape, bytes(t.data)) for n, t in _tensors()
    }
    assert pull_files(store, manifest) == {"config.json": b"{}"}
    assert manifest.full is not None and len(manifest.full.objects) == (3 if shard_bytes == 1 else 1)
    directory = download_hf(store, manifest, tmp_path / "hf")
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]


def test_a_large_version_is_written_as_numbered_files_with_an_index(store: LocalStore, tmp_path: Path) -> None:
    tensors = dict(_tensors())
    directory = write_hf({}, tensors, tmp_path / "hf", shard_bytes=1)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.size_bytes for tensor in tensors.values())
    assert set(index["weight_map"]) == {"model.embed", "model.layer", "scalar"}
    for name, file in index["weight_map"].items():
        data = (directory / file).read_bytes()
        (place,) = read_places(data, source=file)
        assert data[place.offset : place.offset + place.length_bytes] == bytes(tensors[name].data)


def test_places_are_byte_ranges_of_the_object(store: LocalStore) -> None:
    full = _publish(store).manifest.full
    assert full is not None
    for piece, (_, tensor) in zip(full.pieces, _tensors(), strict=True):
        assert store.get(piece.object)[piece.offset : piece.offset + piece.length_bytes] == bytes(tensor.data)


def test_the_file_is_what_the_safetensors_library_reads() -> None:
    numpy_io = pytest.importorskip("safetensors")
    data, places = pack_safetensors(_tensors())
    read = dict(numpy_io.deserialize(data))
    assert {name: bytes(entry["data"]) for name, entry in read.items()} == {n: bytes(t.data) for n, t in _tensors()}
    assert read["model.layer"]["dtype"] == "BF16"
    assert sorted(read_places(data, source="x"), key=lambda p: p.offset) == places


def test_publishing_equal_weights_again_uploads_nothing(store: LocalStore) -> None:
    first = _publish(store)
    before = {info.key for info in store.list("p/")}
    again = _publish(store, epoch=2)
    assert again.already_existed and not first.already_existed
    assert again.manifest_sha256 == first.manifest_sha256
    assert {info.key for info in store.list("p/")} == before


def test_publishing_other_weights_names_both_digests(store: LocalStore) -> None:
    first = _publish(store)
    with pytest.raises(ConflictError) as raised:
        _publish(store, seed=1, epoch=2)
    assert first.manifest.digest in str(raised.value)
    assert raised.value.metadata["computed_digest"] in str(raised.value)
    assert raised.value.metadata["computed_digest"] != first.manifest.digest


def test_versions_share_files_that_were_uploaded_once(store: LocalStore) -> None:
    files = upload_files(store, prefix="p", uid="u", epoch=1, files={"config.json": b"{}", "tokenizer.json": b"[]"})
    published = [
        publish_policy(
            store,
            PolicyPlace(prefix="p", uid="u", lineage=0, version=v),
            PolicyContents(tensors=_tensors(v), files=files),
            epoch=1,
        ).manifest
        for v in (1, 2)
    ]
    assert published[0].files == published[1].files == files
    assert pull_files(store, published[1]) == {"config.json": b"{}", "tokenizer.json": b"[]"}


def test_a_flipped_bit_is_caught(store: LocalStore, tmp_path: Path) -> None:
    manifest = _publish(store).manifest
    assert manifest.full is not None
    piece = manifest.full.pieces[1]
    data = bytearray(store.get(piece.object))
    data[piece.offset] ^= 1
    store.put(piece.object, bytes(data))
    with pytest.raises(CorruptObjectError, match="sha256"):
        pull_tensors(store, manifest)
    with pytest.raises(CorruptObjectError, match="sha256"):
        download_hf(store, manifest, tmp_path / "hf")


def test_a_replaced_manifest_is_caught(store: LocalStore) -> None:
    published = _publish(store)
    with pytest.raises(CorruptObjectError, match="announced"):
        read_manifest(store, published.manifest_key, b"\0" * 32)
    with pytest.raises(NotFoundError):
        read_manifest(store, "p/runs/u/policies/0000-00000009/manifest.json")


def test_a_manifest_with_contradictions_is_refused(store: LocalStore) -> None:
    raw = json.loads(_publish(store).manifest.to_bytes())
    raw["tensors"][0]["digest"] = "0" * 32
    with pytest.raises(CorruptObjectError, match="does not follow"):
        PolicyManifest.from_bytes(json.dumps(raw).encode(), source="x")
    raw = json.loads(_publish(store, epoch=3).manifest.to_bytes())
    raw["files"][0]["name"] = "../escape"
    with pytest.raises(CorruptObjectError, match="plain name"):
        PolicyManifest.from_bytes(json.dumps(raw).encode(), source="x")
    raw["files"][0]["name"] = "tokenizer"
    raw["files"].append({**raw["files"][0], "name": "tokenizer/x.json"})
    with pytest.raises(CorruptObjectError, match="is in what is a file itself"):
        PolicyManifest.from_bytes(json.dumps(raw).encode(), source="x")
    raw["files"][1]["name"] = "tokenizer"
    with pytest.raises(CorruptObjectError, match="named twice"):
        PolicyManifest.from_bytes(json.dumps(raw).encode(), source="x")


def test_files_in_directories_are_published_and_pulled(store: LocalStore, tmp_path: Path) -> None:
    files = {"config.json": b"{}", "additional_chat_templates/tool_use.jinja": b"x"}
    manifest = _publish(store, files=files).manifest
    download_hf(store, manifest, tmp_path / "hf")
    assert (tmp_path / "hf" / "additional_chat_templates" / "tool_use.jinja").read_bytes() == b"x"
    assert pull_files(store, manifest) == files


@pytest.mark.parametrize("data", [b"", b"\xff" * 20, (10).to_bytes(8, "little") + b"{" * 10])
def test_garbage_is_not_a_safetensors_file(data: bytes) -> None:
    with pytest.raises(CorruptObjectError, match=r"obj\.st"):
        read_places(data, source="obj.st")
