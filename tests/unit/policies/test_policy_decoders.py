"""Manifests, safetensors headers and adapter configs of others: whole, or one typed error, and little memory."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import CorruptObjectError, InvalidStateError
from millrace.inference.vllm.lora import parse_adapter_config
from millrace.policies.host_copy import HostCopy, pull_files
from millrace.policies.manifest import AdapterEntry, PolicyManifest, PolicyPlace, Probe
from millrace.policies.peft.config import AdapterSpec
from millrace.policies.publish import PolicyContents, publish_policy
from millrace.policies.tensors import TensorBytes, pack_safetensors, read_places
from millrace.storage.local import LocalStore
from millrace_testing.mutations import mutated_bytes, mutated_json

_TENSORS = [
    ("a.weight", TensorBytes.from_numpy(np.arange(12, dtype=np.float32).reshape(3, 4))),
    ("b", TensorBytes.from_numpy(np.arange(5, dtype=np.uint16), dtype="bfloat16")),
]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return _publish(LocalStore(tmp_path_factory.mktemp("store")))


def _publish(store: LocalStore) -> bytes:
    adapter = AdapterEntry(
        rank=2,
        alpha=4.0,
        target_modules=("q",),
        modules_to_save=(),
        base_key="t/runs/u/policies/0000-00000000/manifest.json",
        base_digest="ab" * 32,
        base_bytes=10,
    )
    published = publish_policy(
        store,
        PolicyPlace(prefix="t", uid="u", lineage=0, version=1),
        PolicyContents(
            tensors=_TENSORS,
            files={"config.json": b"{}"},
            probe=Probe(token_ids=(1, 2), logprobs=(-0.5,)),
            adapter=adapter,
        ),
        epoch=1,
    )
    return store.get(published.manifest_key)


@pytest.mark.computes
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_mutated_manifest_is_whole_or_refused(manifest: bytes, data: st.DataObject) -> None:
    mutated = data.draw(st.one_of(mutated_json(manifest), mutated_bytes(manifest)))
    try:
        found = PolicyManifest.from_bytes(mutated, source="here")
    except CorruptObjectError as error:
        assert "here" in error.message and error.remedy
        return
    assert PolicyManifest.from_bytes(found.to_bytes(), source="again") == found


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"format": "2"}, "format is a JSON str"),
        ({"version": -1}, "version is -1"),
        ({"lineage": True}, "lineage is a JSON bool"),
        ({"version": 1 << 70}, "version is"),
        ({"key": "../x"}, "is no object key"),
        ({"digest": "AB" * 32}, "lower-case hexadecimal"),
        ({"files": [{"name": "x", "key": "k", "sha256": "ab" * 32, "size_bytes": 1 << 50}]}, "size_bytes is"),
        ({"tensors": [{"name": "a", "dtype": "float32", "shape": [1 << 40, 1 << 40], "digest": "00" * 16}]}, "bytes"),
        ({"tensors": [{"name": "a", "dtype": "float32", "shape": [1] * 99, "digest": "00" * 16}]}, "99 items"),
        ({"tensors": [{"name": "a", "dtype": "os", "shape": [1], "digest": "00" * 16}]}, "not supported"),
        ({"probe": {"token_ids": [1], "logprobs": ["x"], "contexts": []}}, "instead of a number"),
        ({"probe": {"token_ids": [1], "logprobs": [], "contexts": [9, 2]}}, "contexts are from 9 to 2"),
        ({"encodings": {}}, "encodings is a JSON dict"),
    ],
)
def test_what_is_wrong_with_a_manifest_is_said(manifest: bytes, change: dict[str, object], cause: str) -> None:
    with pytest.raises(CorruptObjectError, match=cause):
        PolicyManifest.from_bytes(json.dumps({**json.loads(manifest), **change}).encode(), source="here")


@pytest.mark.computes
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_mutated_safetensors_header_is_whole_or_refused(data: st.DataObject) -> None:
    whole, _ = pack_safetensors(_TENSORS)
    length = int.from_bytes(whole[:8], "little")
    header = data.draw(st.one_of(mutated_json(whole[8 : 8 + length]), mutated_bytes(whole[8 : 8 + length])))
    file = len(header).to_bytes(8, "little") + header + whole[8 + length :]
    try:
        found = read_places(data.draw(st.one_of(st.just(file), mutated_bytes(file))), source="here")
    except CorruptObjectError as error:
        assert "here" in error.message
        return
    assert all(place.length_bytes >= 0 and place.offset >= 8 for place in found)


@pytest.mark.computes
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_mutated_adapter_config_is_whole_or_refused(data: st.DataObject) -> None:
    config = AdapterSpec(rank=2, alpha=4.0, target_modules=("q",), modules_to_save=("head",)).to_config()
    mutated = data.draw(st.one_of(mutated_json(config), mutated_bytes(config)))
    try:
        found = parse_adapter_config(mutated, source="here")
    except (CorruptObjectError, InvalidStateError) as error:
        assert "here" in error.message
        return
    assert found.rank >= 1


def test_sizes_that_are_not_there_take_no_memory(tmp_path: Path) -> None:
    """A manifest that is consistent, and whose objects are said to be far larger than they are."""
    store = LocalStore(tmp_path)
    raw = json.loads(_publish(store))
    raw["files"][0]["size_bytes"] = 1 << 29
    (encoding,) = raw["encodings"]
    encoding["objects"][0]["size_bytes"] = 1 << 36
    delta = {**encoding, "codec": "delta", "base": 0, "base_digest": "00" * 32}
    found = PolicyManifest.from_bytes(json.dumps({**raw, "encodings": [encoding, delta]}).encode(), source="here")
    tracemalloc.start()
    try:
        with pytest.raises(CorruptObjectError, match=r"has .* bytes, its manifest says 68719476736"):
            HostCopy(store).stage_manifest(found)
        with pytest.raises(CorruptObjectError, match="its manifest says 536870912"):
            pull_files(store, found)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
