"""What is proved of an engine's weights: changed positions at once, everything else beside the serving."""

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import InternalError
from millrace.inference import readback
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.engine import EngineState, HeldDigest, InflightMode, PolicyIdentity
from millrace.inference.readback import Readback
from millrace.policies.change import TensorChange
from millrace.policies.digest import SHARE_ELEMENTS, bits_digest, digest_hex, policy_digest, share_digests
from millrace.policies.staged import StagedPolicy

V0 = PolicyIdentity(run_uid="r", lineage=0, version=0)
NAME = "model.layers.1.mlp.up_proj.weight"
LIMIT_S = 20.0


@pytest.fixture
async def engine(model_dir, make_model, make_staged) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine()
    staged = make_staged(make_model(0))
    await engine.load(model_dir, staged, identity=V0)
    await engine.prove(staged)
    yield engine
    await engine.close()


@pytest.fixture
def next_version(make_model, make_staged) -> StagedPolicy:
    """Every third element of one tensor changes."""
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


async def until(condition) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


def memory(engine: EmbeddedEngine) -> dict[str, np.ndarray]:
    assert engine._weights is not None
    return dict(engine._weights._readback._bits)


async def test_changes_are_proved_without_reading_everything_which_follows(engine, next_version, monkeypatch):
    monkeypatch.setattr(readback, "share_digests", lambda tensors: pytest.fail("everything was read in the pause"))
    assert (await update(engine, next_version)) == HeldDigest(digest=next_version.manifest.digest, proof="readback")
    await until(lambda: engine._weights._readback.num_unread == 0)
    assert engine.status().state is EngineState.READY


async def test_damage_at_a_changed_position_is_found_before_the_version_serves(engine, next_version):
    memory(engine)[NAME][3] ^= 1  # an element that the version sets anew: the old bits tell
    with pytest.raises(InternalError, match="digest"):
        await update(engine, next_version)


async def test_a_change_that_was_not_written_is_found_before_the_version_serves(engine, next_version, monkeypatch):
    monkeypatch.setattr("millrace.inference.embedded.weights.write_changes", lambda model, changes: None)
    with pytest.raises(InternalError, match=rf"other bits than were written at \d+ of .* {NAME}"):
        await update(engine, next_version)


@pytest.mark.parametrize(("name", "element"), [(NAME, 4), ("model.norm.weight", 0)])
async def test_damage_elsewhere_is_found_beside_the_serving(engine, next_version, name, element):
    memory(engine)[name][element] ^= 1
    await update(engine, next_version)
    await until(lambda: engine.status().state is EngineState.FAILED)
    assert name in engine.status().error and "damaged" in engine.status().error


async def test_a_version_that_was_written_whole_is_read_back_whole_at_once(engine, make_model, make_staged):
    whole = make_staged(make_model(1))
    await engine.check(whole)
    await engine.apply_policy(whole, identity=V0, inflight_mode=InflightMode.KEEP)
    memory(engine)["model.norm.weight"][0] ^= 1
    with pytest.raises(InternalError, match="digest"):
        await engine.prove(whole)


def version_of(bits: np.ndarray, positions: np.ndarray, new: np.ndarray) -> StagedPolicy:
    after = bits.copy()
    after[positions] = new
    digest = policy_digest({"w": ("bfloat16", after.shape, digest_hex(bits_digest(after)))})
    tensors: Any = {"w": SimpleNamespace(dtype="bfloat16", shape=after.shape)}
    changes = {"w": (TensorChange(bits=new, positions=positions),)}
    return StagedPolicy(manifest=SimpleNamespace(digest=digest), tensors=tensors, changes=changes)  # pyright: ignore


def change_of(staged: StagedPolicy) -> TensorChange:
    assert staged.changes is not None
    return staged.changes["w"][0]


def test_writes_beside_the_reader_are_no_damage(monkeypatch):
    monkeypatch.setattr(readback, "_REST", 0.0)
    monkeypatch.setattr(readback, "_SLICE_ELEMENTS", 1 << 12)
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**16, SHARE_ELEMENTS + 1000).astype(np.uint16)  # two shares
    damage: list[str] = []
    heard = threading.Event()

    def report(problem: str) -> None:
        damage.append(problem)
        heard.set()

    held = Readback({"w": bits}, report=report)
    none = np.zeros(0, np.int64)
    held.prove(version_of(bits, none, bits[:0]))
    for _ in range(30):
        positions = np.unique(rng.integers(0, bits.size, 5000))
        staged = version_of(bits, positions, rng.integers(0, 2**16, positions.size).astype(np.uint16))
        held.prepare(staged)
        held.write_changes(staged, partial(change_of(staged).apply, bits))
        assert held.prove(staged) == staged.manifest.digest
    reader = held._reader
    if reader is not None:
        reader.join(LIMIT_S)
    assert damage == [] and held.num_unread == 0
    bits[-1] ^= 1  # the reader does find what is damaged: in the second share
    staged = version_of(np.where(np.arange(bits.size) == bits.size - 1, bits ^ 1, bits), none, bits[:0])
    held.prepare(staged)
    held.write_changes(staged, lambda: None)
    assert held.prove(staged) == staged.manifest.digest
    assert heard.wait(LIMIT_S)
    assert len(damage) == 1 and f"elements from {SHARE_ELEMENTS} on" in damage[0]


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


def test_digests_of_shares_add_up():
    bits = np.random.default_rng(0).integers(0, 2**16, SHARE_ELEMENTS + 5).astype(np.uint16)
    found = share_digests({"a": bits, "empty": bits[:0], "b": bits[:7]})
    mask = (1 << 64) - 1
    halves = [found["a", 0], found["a", SHARE_ELEMENTS]]
    total = (sum(h >> 64 for h in halves) & mask) << 64 | sum(h & mask for h in halves) & mask
    assert (total, found["empty", 0], found["b", 0]) == (bits_digest(bits), 0, bits_digest(bits[:7]))
