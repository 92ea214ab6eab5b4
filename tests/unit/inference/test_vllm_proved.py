"""What a vLLM worker proves of its weights: by what a version changes, and by verifying all in the background."""

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import InternalError
from millrace.inference.vllm.ranks import OrderFiles
from millrace.inference.vllm.workers import layout
from millrace.inference.vllm.workers.layout import ModelMemory, Region, Slot, Write, box_of, writes_of
from millrace.policies import proof
from millrace.policies.digest import bits_digest
from millrace.policies.proof import ContinuedDigests, NextDigests, Row

SIZE, FIRST = 5000, 1000  # elements of the tensor, and where the rank's half begins
DTYPE = "bfloat16"


class Rank:
    """A rank that holds two thirds of a tensor, at an offset of a fused parameter; a share has 700 elements."""

    def __init__(self, bits: np.ndarray) -> None:
        self.region = Region(
            tensor="w",
            slot=Slot(module="m", name="weight"),
            shape=(SIZE - FIRST,),
            source_offset=FIRST,
            source_strides=(1,),
            target_offset=50,
            target_strides=(1,),
        )
        self.model = torch.nn.ModuleDict({"m": torch.nn.Linear(1, 1)})
        self.parameter = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.bfloat16), requires_grad=False)
        self.model["m"].weight = self.parameter
        self.memory[:] = bits[FIRST:]
        self.digests = ContinuedDigests([self.region], ModelMemory(lambda: self.model))

    @property
    def memory(self) -> np.ndarray:
        """Return the bits of the box, to be damaged."""
        return box_of(self.parameter, self.region).numpy().view(np.uint16)

    def writes(self, files: OrderFiles) -> list[Write]:
        return list(writes_of(files, self.region, 2))

    def update(self, files: OrderFiles) -> list[Row]:
        """Return what the worker does; the digests that were foreseen."""
        writes = self.writes(files)
        following = foresee(self.digests, files, writes)
        assert following is not None
        following.result()
        rows = following.rows()
        self.digests.begin_writing()
        for write in writes:
            write.put(files, self.parameter)
        self.digests.accept(following)
        assert rows is not None
        return rows

    def read_all(self) -> str:
        """Return verifies everything in the background; what is damaged."""
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            left, problem, _ = self.digests.verify_next()
            if problem or not left:
                return problem
            time.sleep(0.0005)  # a share is read by a thread
        raise AssertionError("it does not come to an end")


def foresee(digests: ContinuedDigests[Region], files: OrderFiles, writes: list[Write]) -> NextDigests[Region] | None:
    """Return what the worker does before the pause."""
    following = digests.next()
    if following is not None:
        for write in writes:
            write.add_to(following, files)
        following.compute()
    return following


def order(directory: Path, new: np.ndarray, positions: np.ndarray | None) -> OrderFiles:
    """Return an order as `write_order` makes it; positions None copy the tensor whole."""
    path, changes = directory / "policy", directory / "changes"
    new.tofile(path)
    entry = None
    if positions is not None:
        changes.write_bytes(positions.tobytes() + new[positions].tobytes())
        entry = [[int(positions.size), 0, positions.nbytes]] if positions.size else []
    else:
        changes.write_bytes(b"")
    places = [["w", DTYPE, [SIZE], 0, new.nbytes]]
    return OrderFiles({"path": str(path), "places": places, "changed": [["w", entry]], "changes_path": str(changes)})


def bits_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 16, SIZE).astype(np.uint16)


@pytest.fixture(autouse=True)
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SHARE_ELEMENTS", 700)


@pytest.fixture
def rank() -> Rank:
    rank = Rank(bits_of(0))
    [[name, key, count, digest]] = rank.digests.read(["w"])
    assert (name, key, count) == ("w", f"{FIRST}:({SIZE - FIRST},)", SIZE - FIRST)
    assert int(digest, 16) == bits_digest(bits_of(0)[FIRST:], start=FIRST)
    return rank


@given(seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.001, 0.1, 1.0, None]))
def test_foreseen_digests_are_those_of_what_is_then_held(
    tmp_path_factory: pytest.TempPathFactory, seed: int, share: float | None
) -> None:
    old, rng = bits_of(seed), np.random.default_rng(seed)
    rank = Rank(old)
    rank.digests.read(["w"])
    positions = None if share is None else np.flatnonzero(rng.random(SIZE) < share)
    new = bits_of(seed + 1) if positions is None else old.copy()
    if positions is not None:
        new[positions] ^= rng.integers(1, 1 << 16, positions.size).astype(np.uint16)
    [[_, _, count, digest]] = rank.update(order(tmp_path_factory.mktemp("order"), new, positions))
    np.testing.assert_array_equal(rank.memory, new[FIRST:])
    assert (count, int(digest, 16)) == (SIZE - FIRST, bits_digest(new[FIRST:], start=FIRST))
    assert not rank.parameter[:50].any(), "nothing beside the box is touched"
    assert rank.read_all() == ""


def test_a_damaged_element_that_changes_shows_before_the_pause(rank: Rank, tmp_path: Path) -> None:
    new = bits_of(0)
    new[2000] ^= 1
    rank.memory[2000 - FIRST] ^= 2  # somebody else wrote there
    [[*_, digest]] = rank.update(order(tmp_path, new, np.array([2000])))
    assert int(digest, 16) != bits_digest(new[FIRST:], start=FIRST)


@pytest.mark.parametrize("position", [FIRST, 3333, SIZE - 1])
def test_a_damaged_element_that_does_not_change_is_found_in_the_background(
    rank: Rank, tmp_path: Path, position: int
) -> None:
    new = bits_of(0)
    new[2000] ^= 1
    rank.update(order(tmp_path, new, np.array([2000])))
    rank.memory[position - FIRST] ^= 1
    assert "w is damaged in the engine's memory" in rank.read_all()


def test_what_is_staged_on_a_device_is_written_and_read_back_there(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a GPU, on tensors of a CPU."""
    files = order(tmp_path, bits_of(1), np.array([1500, 4000]))
    [write] = rank.writes(files)
    assert write.on(torch.device("cpu")) is write
    assert write.index is not None and write.bits is not None
    staged = replace(write, staged=(torch.from_numpy(write.index), torch.from_numpy(write.bits.view(np.int16))))
    staged.put(files, rank.parameter)
    assert rank.memory[500] == bits_of(1)[1500]
    monkeypatch.setattr(layout, "scatter", lambda *_: None)
    [later] = rank.writes(order(tmp_path, bits_of(2), np.array([1500, 4000])))
    assert later.index is not None and later.bits is not None
    lost = replace(later, staged=(torch.from_numpy(later.index), torch.from_numpy(later.bits.view(np.int16))))
    with pytest.raises(InternalError, match="other bits than were written"):
        lost.put(files, rank.parameter)


@pytest.mark.parametrize("positions", [np.array([1500, 4000]), None], ids=["changes", "whole"])
def test_a_write_that_does_not_take_is_an_error(
    rank: Rank, tmp_path: Path, positions: np.ndarray | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = order(tmp_path, bits_of(1), positions)
    [write] = rank.writes(files)
    write.put(files, rank.parameter)
    assert rank.memory[500] == bits_of(1)[1500]
    monkeypatch.setattr(layout, "scatter", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda tensor, _: tensor)
    with pytest.raises(InternalError, match=r"other bits than were written at [0-9]+ elements of w"):
        write.put(files, torch.zeros(SIZE, dtype=torch.bfloat16))


def test_nothing_is_foreseen_from_what_was_not_proved(rank: Rank, tmp_path: Path) -> None:
    files = order(tmp_path, bits_of(1), np.array([1500]))
    unread = Rank(bits_of(0))
    assert foresee(unread.digests, files, unread.writes(files)) is None
    rank.digests.begin_writing()  # and then it failed
    assert foresee(rank.digests, files, rank.writes(files)) is None
    assert rank.digests.verify_next() == (0, "", False)
    assert rank.read_all() == ""


def test_a_version_that_comes_meanwhile_has_everything_read_again(rank: Rank, tmp_path: Path) -> None:
    shares = math.ceil((SIZE - FIRST) / 700) + 1  # cut at multiples of the tensor, so the first and last are short
    old = bits_of(0)
    for version in range(3):
        new = old.copy()
        new[FIRST + version] ^= 1
        rank.update(order(tmp_path, new, np.array([FIRST + version])))
        old = new
        left, problem, _ = rank.digests.verify_next()
        assert 0 < left <= shares and not problem
    assert rank.read_all() == ""
    rank.memory[0] ^= 1
    rank.digests.accept(_foreseen(rank, tmp_path, old))
    assert "elements from 1000 on" in rank.read_all()


def test_versions_that_come_between_verified_shares_are_no_damage(rank: Rank, tmp_path: Path) -> None:
    rng, held = np.random.default_rng(0), bits_of(0)
    for _ in range(30):
        positions = np.unique(rng.integers(0, SIZE, 500))
        held = held.copy()
        held[positions] = rng.integers(0, 1 << 16, positions.size)
        rank.update(order(tmp_path, held, positions))
        problems = [rank.digests.verify_next()[1] for _ in range(rng.integers(0, 12))]
        assert not any(problems)
    assert rank.read_all() == ""
    np.testing.assert_array_equal(rank.memory, held[FIRST:])
    rank.memory[-1] ^= 1
    rank.digests.accept(_foreseen(rank, tmp_path, held))
    assert "w is damaged in the engine's memory" in rank.read_all()


def test_a_box_that_is_named_twice_is_one(rank: Rank) -> None:
    twice = ContinuedDigests([rank.region, rank.region], ModelMemory(lambda: rank.model))
    assert twice.read(["w"]) == rank.digests.read(["w"])


def _foreseen(rank: Rank, directory: Path, bits: np.ndarray) -> NextDigests[Region]:
    """Return a version in which nothing changes."""
    files = order(directory, bits, np.array([], np.int64))
    foreseen = foresee(rank.digests, files, rank.writes(files))
    assert foreseen is not None
    return foreseen
