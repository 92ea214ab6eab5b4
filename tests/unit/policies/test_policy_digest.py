"""Digests: sharding does not change them, every change of the content does."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.policies import digest as digest_module
from millrace.policies.digest import add_digests, policy_digest, tensor_digest
from millrace.policies.tensors import TensorBytes


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
    monkeypatch.setattr(digest_module, "_BLOCK_ELEMENTS", 7)
    assert tensor_digest(_tensor(values)) == whole


def _plain(bits: list[int]) -> str:
    """The same formula in plain integers."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    lanes = [0, 0]
    for index, element in enumerate(bits):
        place = mix(index * 0x9E3779B97F4A7C15 & mask)
        for lane, key in enumerate((0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7)):
            lanes[lane] += mix((element ^ place) + key * (place | 1) & mask)
    return "".join(f"{lane & mask:016x}" for lane in lanes)


def test_known_value_pins_the_format() -> None:
    # A change here breaks the comparison with every policy that was published before.
    found = f"{tensor_digest(_tensor(np.array([1.0, -2.5, 0.0], dtype=np.float32))):032x}"
    assert found == _plain([0x3F800000, 0xC0200000, 0]) == "9fd640bcf94cdc640ed4e4910eb15b03"


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
