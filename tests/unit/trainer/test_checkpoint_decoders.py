"""Checkpoint manifests and indices that others wrote: whole, or one typed error."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import CorruptObjectError
from millrace.storage.base import with_checksum
from millrace.trainer.checkpoint.index import ShardPiece, ShardTensor, decode_index, encode_index
from millrace.trainer.checkpoint.manifest import FORMAT, CheckpointManifest, CheckpointObject
from millrace_testing.mutations import mutated_bytes, mutated_json

_SIZES = {"rank-00000.bin": 56, "rank-00001.bin": 40}
_INDEX = encode_index(
    [
        ShardTensor(
            name="model.a",
            dtype="float32",
            shape=(4, 5),
            pieces=(ShardPiece("rank-00000.bin", 0, 0, 10), ShardPiece("rank-00001.bin", 0, 10, 10)),
        ),
        ShardTensor(name="rng.cpu.0", dtype="uint8", shape=(16,), pieces=(ShardPiece("rank-00000.bin", 40, 0, 16),)),
        ShardTensor(name="model.empty", dtype="bfloat16", shape=(0, 3), pieces=()),
    ]
)
_MANIFEST = CheckpointManifest(
    format=FORMAT,
    run_uid="run-a",
    run_hash="ab" * 32,
    step=4,
    lineage=0,
    chain_hash="01" * 32,
    epoch=3,
    world_size=2,
    determinism="strict",
    conditions={"torch": "2"},
    objects=tuple(
        CheckpointObject(name=name, key=f"t/{name}", sha256="cd" * 32, size_bytes=size) for name, size in _SIZES.items()
    ),
    created="now",
).to_bytes()


@pytest.mark.computes
@settings(max_examples=100, deadline=None)
@given(st.one_of(mutated_json(_INDEX), mutated_bytes(_INDEX)))
def test_a_mutated_index_is_whole_or_refused(data: bytes) -> None:
    try:
        found = decode_index(data, sizes=_SIZES, source="here")
    except CorruptObjectError as error:
        assert "here" in error.message and error.reason == "CHECKPOINT_INDEX_INVALID" and error.remedy
        return
    for tensor in found.values():
        assert sum(piece.count for piece in tensor.pieces) == tensor.num_elements
        assert all(piece.offset + piece.count * tensor.element_bytes <= _SIZES[piece.file] for piece in tensor.pieces)


@pytest.mark.computes
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_mutated_manifest_is_whole_or_refused(data: st.DataObject) -> None:
    mutated = data.draw(st.one_of(mutated_json(_MANIFEST), mutated_bytes(_MANIFEST)))
    if data.draw(st.booleans()):
        with contextlib.suppress(ValueError, AttributeError):  # no JSON, or what no JSON may hold
            mutated = with_checksum(json.loads(mutated))
    try:
        found = CheckpointManifest.from_bytes(mutated, source="here")
    except CorruptObjectError as error:
        assert "here" in error.message and error.reason == "CHECKPOINT_MANIFEST_INVALID" and error.remedy
        return
    assert CheckpointManifest.from_bytes(found.to_bytes(), source="again") == found


@pytest.mark.parametrize("place", range(0, len(_MANIFEST), 7))
def test_no_bit_of_a_manifest_can_change(place: int) -> None:
    data = bytearray(_MANIFEST)
    data[place] ^= 1
    with pytest.raises(CorruptObjectError):
        CheckpointManifest.from_bytes(bytes(data), source="here")


def _changed(place: int, change: dict[str, object]) -> bytes:
    raw = json.loads(_INDEX)
    raw["tensors"][place] |= change
    return json.dumps(raw).encode()


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (_changed(0, {"shape": [1 << 40, 1 << 40]}), "has more than"),
        (_changed(0, {"shape": [4, 6]}), "24 elements, and its pieces 20"),
        (_changed(0, {"shape": [4, -5]}), "is -5"),
        (_changed(0, {"dtype": "os.system"}), "not supported"),
        (_changed(0, {"dtype": "float64"}), "are not the 56 bytes of rank-00000.bin, each once"),
        (_changed(0, {"pieces": [["rank-00000.bin", 0, 0, 10]] * 2}), "those before it end at 10"),
        (_changed(0, {"pieces": [["/etc/passwd", 0, 0, 20]]}), "'/etc/passwd'"),
        (_changed(1, {"pieces": [["rank-00000.bin", 1 << 60, 0, 16]]}), "each once"),
        (_changed(1, {"pieces": [["rank-00000.bin", 39, 0, 16]]}), "each once"),
        (_changed(1, {"name": "model.a"}), "named twice"),
        (b"\x80\x04N.", "invalid start byte"),
    ],
)
def test_what_is_wrong_with_an_index_is_said(data: bytes, cause: str) -> None:
    with pytest.raises(CorruptObjectError, match=cause):
        decode_index(data, sizes=_SIZES, source="here")
