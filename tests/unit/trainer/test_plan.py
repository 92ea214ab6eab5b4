"""Plans of micro-batches: every sample once, bounded, equal for all ranks, packed where that costs less."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.trainer.learning.plan import Packing, in_order, plan_micro_batches

DENSE = Packing(per_token=1e6, per_square=1e2, causal_cost=2.0, masked_cost=3.2)
VARLEN = replace(DENSE, is_varlen=True)
PACKINGS = [
    None,
    DENSE,
    VARLEN,
    replace(DENSE, is_always=True),
    replace(VARLEN, is_always=True),
    replace(DENSE, per_square=1e9),
]


@given(
    lengths=st.lists(st.integers(min_value=0, max_value=50), max_size=40),
    max_tokens=st.integers(min_value=1, max_value=200),
    world_size=st.integers(min_value=1, max_value=4),
    packing=st.sampled_from(PACKINGS),
)
def test_plan_covers_every_sample_once_within_the_bound(
    lengths: list[int], max_tokens: int, world_size: int, packing: Packing | None
) -> None:
    plan = plan_micro_batches(lengths, max_tokens=max_tokens, world_size=world_size, packing=packing)
    assert plan == plan_micro_batches(lengths, max_tokens=max_tokens, world_size=world_size, packing=packing)
    assert len(plan) == world_size
    assert len({len(rank) for rank in plan}) == 1
    micro_batches = [rows for rank in plan for rows in rank]
    taken = [index for rows in micro_batches for row in rows for index in row]
    real = [index for index, length in enumerate(lengths) if length]
    assert sorted(taken) == real
    for rows in micro_batches:
        assert all(rows), "no row is empty"
        width = max((sum(lengths[index] for index in row) for row in rows), default=0)
        assert [len(row) for row in rows] == [1] or len(rows) * width <= max_tokens
    if len(real) >= world_size:
        assert all(rank[0] for rank in plan), "no rank is idle while there are samples for all of them"


def test_small_batches_give_every_rank_work() -> None:
    """128 samples that fit into two micro-batches, on eight ranks."""
    plan = plan_micro_batches([64] * 128, max_tokens=4096, world_size=8)
    assert [[len(micro_batch) for micro_batch in rank] for rank in plan] == [[16]] * 8
    alone = plan_micro_batches([64] * 128, max_tokens=4096)
    assert alone == [[[[index] for index in range(64)], [[index] for index in range(64, 128)]]], "one rank is as it was"
    long_and_short = plan_micro_batches([500, 10, 10, 10, 10], max_tokens=100, world_size=3)
    assert long_and_short == [[[[0]]], [[[1], [2]]], [[[3], [4]]]]


def test_padded_rows_are_sorted_by_length_so_that_little_is_padded() -> None:
    assert plan_micro_batches([3, 9, 4, 10], max_tokens=20) == [[[[3], [1]], [[2], [0]]]]


def test_a_row_with_a_dense_mask_is_as_long_as_its_longest_sample_and_one_of_varying_lengths_as_the_micro_batch() -> (
    None
):
    lengths = [10, 6, 4, 3, 3, 3]
    dense = plan_micro_batches(lengths, max_tokens=30, packing=replace(DENSE, is_always=True))
    assert dense == [[[[0], [1, 2], [3, 4, 5]]]], "29 tokens in three rows of 10, which would be 60 with padding"
    assert plan_micro_batches(lengths, max_tokens=30, packing=replace(VARLEN, is_always=True)) == [
        [[[0, 1, 2, 3, 4, 5]]]
    ]
    halves = plan_micro_batches(lengths, max_tokens=30, packing=replace(VARLEN, is_always=True), world_size=2)
    assert halves == [[[[0, 2, 4]]], [[[1, 3, 5]]]]


@pytest.mark.parametrize(("per_square", "is_packed"), [(1e2, True), (1e6, False)])
def test_what_costs_less_is_chosen(per_square: float, is_packed: bool) -> None:
    """Packing saves one row of five, at attention that is 1.6 times as dear."""
    packing = replace(DENSE, per_square=per_square)
    (plan,) = plan_micro_batches([100, 90, 80, 50, 10], max_tokens=600, packing=packing)
    assert any(len(row) > 1 for rows in plan for row in rows) == is_packed


def test_equal_lengths_are_not_packed() -> None:
    (plan,) = plan_micro_batches([64] * 8, max_tokens=256, packing=DENSE)
    assert all(len(row) == 1 for rows in plan for row in rows)
    assert plan_micro_batches([64] * 8, max_tokens=256, packing=replace(DENSE, is_always=True)) == [plan]


def test_the_ranks_wait_for_the_dearest() -> None:
    packing = Packing(per_token=1.0, per_square=0.0, causal_cost=1.0, masked_cost=1.0)
    assert packing.cost_of_ranks([[[[0], [1]], []], [[[2]], [[3]]]], [5, 3, 4, 2]) == 2 * 5 + 2


def test_samples_are_numbered_as_they_stand_in_rows() -> None:
    assert in_order([[7, 3], [5], [2, 9, 4]]) == [[0, 1], [2], [3, 4, 5]]
    assert in_order([]) == []
