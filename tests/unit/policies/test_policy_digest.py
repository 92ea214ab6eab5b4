"""Digests: sharding does not change them, every change of the content does."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.policies import digest as digest_module
from millrace.policies.digest import add_digests, bits_digest, change_digest, policy_digest, tensor_digest
from millrace.policies.tensors import TensorBytes, TensorChange


def _tensor(values: np.ndarray) -> TensorBytes:
    return TensorBytes.from_numpy(values)


@given(cuts=st.lists(st.integers(min_value=0, max_value=1000), max_size=5))
def test_sum_of_shards_is_the_whole(cuts: list[int]) -> None:
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    edges = [0, *sorted(cuts), 1000]
    shards = [tensor_digest(_tensor(values[begin:end]), start=begin) for begin, end in pairwise(edges)]
    assert add_digests(shards) == tensor_digest(_tensor(values))


def test_blocks_do_not_change_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(1000, dtype=np.float32)
    whole = tensor_digest(_tensor(values))
    monkeypatch.setattr(digest_module, "BLOCK_ELEMENTS", 7)
    assert tensor_digest(_tensor(values)) == whole


def _plain(bits: list[int]) -> str:
    """Return the same formula in plain integers."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    lanes = [0, 0]
    for index, element in enumerate(bits):
        place = (2 * index + 1) * 0x9E3779B97F4A7C15 & mask
        mixed = mix(place + element * 0xD1B54A32D192ED03 & mask)
        lanes = [lanes[0] + mixed, lanes[1] + mixed * place]
    return "".join(f"{lane & mask:016x}" for lane in lanes)


def test_known_value_pins_the_format() -> None:
    # A change here breaks the comparison with every policy that was published before.
    found = f"{tensor_digest(_tensor(np.array([1.0, -2.5, 0.0], dtype=np.float32))):032x}"
    assert found == _plain([0x3F800000, 0xC0200000, 0]) == "edc2d140337832639d36b68d0f84ca79"


def test_every_kind_of_change_is_seen() -> None:
    values = np.random.default_rng(2).standard_normal(64).astype(np.float32)
    whole = tensor_digest(_tensor(values))
    swapped = values.copy()
    swapped[[3, 40]] = swapped[[40, 3]]
    bit = values.copy()
    bit.view(np.uint32)[17] ^= 1
    negative_zero, zero = np.array([-0.0], dtype=np.float32), np.array([0.0], dtype=np.float32)
    assert tensor_digest(_tensor(swapped)) != whole
    assert tensor_digest(_tensor(bit)) != whole
    assert tensor_digest(_tensor(values), start=1) != whole
    assert tensor_digest(_tensor(negative_zero)) != tensor_digest(_tensor(zero))
    lanes = tensor_digest(_tensor(bit))
    assert lanes >> 64 != whole >> 64 and lanes % 2**64 != whole % 2**64


def test_policy_digest_ignores_order_and_sees_names_dtypes_shapes() -> None:
    one, two = ("float32", (2, 3), "aa"), ("float32", (4,), "bb")
    base = policy_digest({"a": one, "b": two})
    assert policy_digest({"b": two, "a": one}) == base
    assert policy_digest({"a": two, "b": one}) != base
    assert policy_digest({"a": ("bfloat16", (2, 3), "aa"), "b": two}) != base
    assert policy_digest({"a": ("float32", (3, 2), "aa"), "b": two}) != base


def _stored_formula(values: np.ndarray, start: int) -> int:
    """Return the digest without blocks and scratch: policies that were published then must keep their digests."""

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    place = (2 * np.arange(start, start + values.size, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = mix(place + values.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03))
    return int(mixed.sum(dtype=np.uint64)) << 64 | int((mixed * place).sum(dtype=np.uint64))


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    size=st.sampled_from([0, 1, 16_384, 16_385, 40_000]) | st.integers(0, 300),
    start=st.sampled_from([0, 1, 2**40]),
)
def test_the_digest_is_what_was_stored(width: int, size: int, start: int) -> None:
    values = np.random.default_rng(size).integers(0, 256, size * width, dtype=np.uint8).view(f"<u{width}")
    assert bits_digest(values, start=start) == _stored_formula(values, start)


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    size=st.integers(1, 300) | st.just(40_000),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    contiguous=st.booleans(),
)
def test_the_digest_follows_a_change(width: int, size: int, share: float, contiguous: bool) -> None:
    rng = np.random.default_rng(size)
    held, other = (rng.integers(0, 256, size * width, dtype=np.uint8).view(f"<u{width}") for _ in range(2))
    if contiguous:
        begin = int(rng.integers(0, size))
        change = TensorChange(bits=other[begin : begin + int(size * share)], start=begin)
    else:
        positions = np.flatnonzero(rng.random(size) < share)
        change = TensorChange(bits=other[positions], positions=positions)
    before = bits_digest(held)
    after = change_digest(before, change, change.old_bits(held))
    change.apply(held)
    assert after == bits_digest(held)
    assert change_digest(after, change, change.old_bits(held)) == after, "applied twice is applied once"
