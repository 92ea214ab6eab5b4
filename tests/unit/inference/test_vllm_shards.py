"""Digests of tensors that several ranks hold in parts: cut along rows, cut across rows, held twice, or padded."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import InternalError
from millrace.inference.vllm.ranks import OrderFiles
from millrace.inference.vllm.workers import layout
from millrace.inference.vllm.workers.layout import ModelMemory, Region, Slot, box_of, slices_of, source_of, writes_of
from millrace.policies import proof
from millrace.policies.digest import bits_digest, digest_hex
from millrace.policies.manifest import TensorEntry
from millrace.policies.proof import ContinuedDigests, Row, combine

ROWS, COLUMNS = 40, 30


class Rank:
    """A rank that holds rows `rows` and columns `columns` of the tensor, after 7 elements of another one."""

    def __init__(self, bits: np.ndarray, rows: slice, columns: slice) -> None:
        part = torch.from_numpy(bits.view(np.int16))[rows, columns]
        self.region = Region(
            tensor="w",
            slot=Slot(module="m", name="weight"),
            shape=tuple(part.shape),
            source_offset=int(part.storage_offset()),
            source_strides=part.stride(),
            target_offset=7,
            target_strides=(part.shape[1], 1),
        )
        zeros = torch.zeros(7 + part.numel() + 5, dtype=torch.bfloat16)
        self.model = torch.nn.ModuleDict({"m": torch.nn.Linear(1, 1)})
        self.model["m"].weight = self.parameter = torch.nn.Parameter(zeros, requires_grad=False)
        self.digests = ContinuedDigests([self.region], ModelMemory(lambda: self.model))
        box_of(self.parameter, self.region).copy_(part)

    def rows(self) -> list[Row]:
        return self.digests.read(["w"])

    def update(self, files: OrderFiles) -> list[Row]:
        following = self.digests.next()
        assert following is not None
        writes = [write for part in slices_of(files, "w") for write in writes_of(files, self.region, 2, part)]
        for write in writes:
            write.add_to(following, files)
        following.compute()
        following.result()
        rows = following.rows()
        assert rows is not None
        self.digests.begin_writing()
        for write in writes:
            write.put(files, self.parameter)
        self.digests.accept(following)
        return rows

    def read_all(self) -> str:
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            left, problem, _ = self.digests.verify_next()
            if problem or not left:
                return problem
            time.sleep(0)  # for the thread that digests
        raise AssertionError("it does not come to an end")


def bits_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 16, (ROWS, COLUMNS)).astype(np.uint16)


def manifest(bits: np.ndarray) -> Any:
    entry = TensorEntry(name="w", shape=bits.shape, dtype="bfloat16", digest=digest_hex(bits_digest(bits.reshape(-1))))
    return SimpleNamespace(tensors=(entry,))


def order(directory: Path, new: np.ndarray, positions: np.ndarray | None) -> OrderFiles:
    path, changes = directory / "policy", directory / "changes"
    new.tofile(path)
    entry = None
    changes.write_bytes(b"")
    if positions is not None:
        changes.write_bytes(positions.tobytes() + new.reshape(-1)[positions].tobytes())
        entry = [[int(positions.size), 0, positions.nbytes]] if positions.size else []
    places = [["w", "bfloat16", list(new.shape), 0, new.nbytes]]
    return OrderFiles({"path": str(path), "places": places, "changed": [["w", entry]], "changes_path": str(changes)})


def cut(bits: np.ndarray, how: str, at: int) -> list[Rank]:
    every = slice(None)
    if how == "rows":
        return [Rank(bits, slice(0, at), every), Rank(bits, slice(at, None), every)]
    if how == "twice":
        return [Rank(bits, every, every), Rank(bits, every, every)]
    return [Rank(bits, every, slice(0, at)), Rank(bits, every, slice(at, None))]


@pytest.fixture(autouse=True, scope="module")
def small_shares() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "SHARE_ELEMENTS", 77)  # ends within rows, and within gaps between runs
        patch.setattr(layout, "SLICE_ELEMENTS", 50)
        yield


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    how=st.sampled_from(["rows", "columns", "twice"]),
    at=st.integers(1, COLUMNS - 1),
    share=st.sampled_from([0.0, 0.01, 0.5, None]),
)
def test_the_ranks_parts_add_up_to_the_tensor(
    tmp_path_factory: pytest.TempPathFactory, seed: int, how: str, at: int, share: float | None
) -> None:
    old, rng = bits_of(seed), np.random.default_rng(seed)
    ranks = cut(old, how, at)
    assert combine([rank.rows() for rank in ranks], manifest(old)).is_whole
    new, positions = bits_of(seed + 1), None
    if share is not None:
        chosen = np.flatnonzero(rng.random(old.size) < share)
        new, positions = old.copy(), chosen.astype(np.int64)
        new.reshape(-1)[chosen] = bits_of(seed + 1).reshape(-1)[chosen]
    files = order(tmp_path_factory.mktemp("order"), new, positions)
    assert combine([rank.update(files) for rank in ranks], manifest(new)).is_whole
    for rank in ranks:
        assert torch.equal(box_of(rank.parameter, rank.region), source_of(files, rank.region))
        assert rank.read_all() == ""
        assert not rank.parameter.view(torch.int16)[:7].any(), "what is before the box is another tensor's"
    assert combine([rank.rows() for rank in ranks], manifest(new)).is_whole


@pytest.mark.parametrize("how", ["rows", "columns", "twice"])
def test_one_wrong_element_of_one_rank_is_found(how: str, tmp_path: Path) -> None:
    bits = bits_of(1)
    ranks = cut(bits, how, 13)
    for rank in ranks:
        rank.rows()
        rank.update(order(tmp_path, bits, np.array([], np.int64)))
    ranks[1].parameter.view(torch.int16)[7 + 5] ^= 1
    assert ranks[0].read_all() == "" and "damaged" in ranks[1].read_all()
    with pytest.raises(InternalError, match="different bits" if how == "twice" else "the engine holds digest"):
        combine([rank.rows() for rank in ranks], manifest(bits))


def test_a_part_that_nobody_holds_is_not_proved() -> None:
    bits = bits_of(2)
    found = combine([cut(bits, "columns", 13)[0].rows()], manifest(bits))
    assert not found.is_whole and found.names == ()


def test_what_is_scattered_in_memory_is_not_in_runs() -> None:
    part = {"tensor": "w", "slot": Slot(module="m", name="weight"), "shape": (4, 3), "source_offset": 0}
    assert Region(**part, source_strides=(9, 1), target_offset=0, target_strides=(3, 1)).is_in_runs
    for source, target in (((9, 1), (6, 1)), ((1, 4), (3, 1)), ((9, 2), (3, 1))):
        assert not Region(**part, source_strides=source, target_offset=0, target_strides=target).is_in_runs
