"""What is proved of the embedded engine's weights: everything, by reading it back, before a version serves."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import InternalError, UnavailableError
from millrace.inference.embedded import loader
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.loader import held_tensors
from millrace.inference.engine import EngineState, HeldDigest, InflightMode, PolicyIdentity
from millrace.policies import digest
from millrace.policies.digest import bits_digest, tensor_digests
from millrace.policies.manifest import StagedPolicy
from millrace.policies.tensors import TensorChange

V0 = PolicyIdentity(run_uid="r", lineage=0, version=0)
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[torch.nn.Module]:
    """Return the models that engines have loaded, whose memory can be damaged."""
    found: list[torch.nn.Module] = []
    load = loader.load_model

    def noting(*args: Any, **options: Any) -> torch.nn.Module:
        found.append(load(*args, **options))
        return found[-1]

    monkeypatch.setattr(loader, "load_model", noting)
    return found


@pytest.fixture
async def engine(model_dir, make_model, make_staged, loaded) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine()
    staged = make_staged(make_model(0))
    await engine.load(model_dir, staged, identity=V0)
    await engine.prove(staged)
    yield engine
    await engine.close()


@pytest.fixture
def next_version(make_model, make_staged) -> StagedPolicy:
    """Return every third element of one tensor changes."""
    new = make_model(0)
    new.get_submodule(NAME.removesuffix(".weight")).weight.view(-1)[::3] *= 1.5
    bits = make_staged(new).tensors[NAME].bits()
    positions = np.arange(0, bits.size, 3, dtype=np.int64)
    return make_staged(new, changes={NAME: (TensorChange(bits=bits[::3], positions=positions),)}, base=(0, 0))


async def update(engine: EmbeddedEngine, staged: StagedPolicy) -> HeldDigest:
    await engine.check(staged)
    identity = PolicyIdentity(run_uid="r", lineage=0, version=1)
    await engine.apply_policy(staged, identity=identity, inflight_mode=InflightMode.KEEP)
    return await engine.prove(staged)


def memory(model: torch.nn.Module, name: str) -> np.ndarray:
    """Return the bits of a weight, to be damaged."""
    data = held_tensors(model, [name])[name].data
    return np.frombuffer(data, np.uint8)


async def test_a_version_of_changes_is_proved(engine, next_version):
    assert (await update(engine, next_version)) == HeldDigest(digest=next_version.manifest.digest, proof="readback")
    assert engine.status().state is EngineState.READY


async def test_nothing_is_scored_between_new_weights_and_their_proof(engine, next_version):
    tokens = (1, 2, 3)
    before = await engine.score(tokens)
    await engine.apply_policy(next_version, identity=V0, inflight_mode=InflightMode.KEEP)
    with pytest.raises(UnavailableError, match="being put in"):
        await engine.score(tokens)
    await engine.prove(next_version)
    assert (await engine.score(tokens)).logprobs.tolist() != before.logprobs.tolist()


async def test_a_change_that_was_not_written_is_found_before_the_version_serves(engine, next_version, monkeypatch):
    monkeypatch.setattr("millrace.inference.embedded.loader.write_changes", lambda *_, **__: None)
    with pytest.raises(InternalError, match="the engine holds digest"):
        await update(engine, next_version)


@pytest.mark.parametrize(("name", "byte"), [(NAME, 4), ("model.norm.weight", 0)])
async def test_damage_is_found_before_the_next_version_serves(engine, loaded, next_version, name, byte):
    # Of an element that the version does not set anew: that one's old bits are gone, and nobody needs them.
    memory(loaded[0], name)[byte] ^= 1
    with pytest.raises(InternalError, match="digest"):
        await update(engine, next_version)


async def test_a_version_that_was_written_whole_is_read_back_whole(engine, loaded, make_model, make_staged):
    whole = make_staged(make_model(1))
    await engine.check(whole)
    await engine.apply_policy(whole, identity=V0, inflight_mode=InflightMode.KEEP)
    memory(loaded[0], "model.norm.weight")[0] ^= 1
    with pytest.raises(InternalError, match="digest"):
        await engine.prove(whole)


@given(
    positions=st.lists(st.integers(0, 99), unique=True, max_size=30).map(sorted),
    start=st.integers(0, 60),
    count=st.integers(0, 40),
    size=st.integers(1, 50),
)
def test_shares_of_a_change_are_the_change(positions, start, count, size):
    sparse = TensorChange(bits=np.arange(len(positions), dtype=np.uint16) + 1, positions=np.array(positions, np.int64))
    dense = TensorChange(bits=np.arange(count, dtype=np.uint16) + 1, start=start)
    for change in (sparse, dense):
        whole, parts = np.zeros((2, 100), np.uint16)
        change.apply(whole)
        for first, part in change.shares(size):
            assert first % size == 0 and part.num_elements > 0
            (set_,) = np.nonzero(_applied(part))
            assert first <= set_.min() and set_.max() < first + size
            part.apply(parts)
        np.testing.assert_array_equal(whole, parts)


def _applied(change: TensorChange) -> np.ndarray:
    bits = np.zeros(100, np.uint16)
    change.apply(bits)
    return bits


def test_tensors_are_digested_in_shares(monkeypatch):
    monkeypatch.setattr(digest, "_SHARE_ELEMENTS", 1000)
    bits = np.random.default_rng(0).integers(0, 2**16, 2005).astype(np.uint16)
    found = tensor_digests({"a": bits, "empty": bits[:0], "b": bits[:7]})
    assert found == {"a": bits_digest(bits), "empty": 0, "b": bits_digest(bits[:7])}
