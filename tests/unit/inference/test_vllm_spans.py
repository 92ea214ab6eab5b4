"""Which changes of a tensor can be in a box: found by search, and none is missed."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.inference.vllm.workers.layout import Region, Slot


def region(*, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> Region:
    return Region(
        tensor="w",
        slot=Slot(module="m", name="weight"),
        shape=shape,
        source_offset=offset,
        source_strides=strides,
        target_offset=0,
        target_strides=strides,
    )


BOX = region(shape=(3, 4), offset=20, strides=(4, 1))
"""Elements 20 to 31."""
COLUMNS = region(shape=(3, 2), offset=12, strides=(10, 1))
"""Elements 12, 13, 22, 23, 32, 33."""


@pytest.mark.parametrize(
    ("box", "positions", "found"),
    [
        (BOX, [19, 20, 31, 32], [20, 31]),  # first and last are in it, their neighbours are not
        (BOX, [20], [20]),
        (BOX, [31], [31]),
        (BOX, [0, 19], []),
        (BOX, [32, 99], []),
        (BOX, [], []),
        (BOX, [19, 20, 20, 20, 31, 31, 32], [20, 20, 20, 31, 31]),  # each as often as it is there
        (COLUMNS, [11, 12, 20, 33, 34], [12, 20, 33]),  # between the ends, though 20 is in no column
        (region(shape=(0, 4), offset=20, strides=(4, 1)), [19, 20, 21], []),
        (region(shape=(), offset=20, strides=()), [19, 20, 21], [20]),
        (region(shape=(5,), offset=20, strides=(0,)), [19, 20, 21], [20]),  # one element, repeated
    ],
)
def test_the_changes_between_first_and_last_element_are_found(
    box: Region, positions: list[int], found: list[int]
) -> None:
    every = np.array(positions, np.int64)
    assert every[box.span_of(every)].tolist() == found


def test_an_empty_span_says_where_it_would_be() -> None:
    assert BOX.span_of(np.array([5, 40], np.int64)) == slice(1, 1)
    assert BOX.span_of(np.array([], np.int64)) == slice(0, 0)


def test_places_beyond_four_bytes_are_told_apart() -> None:
    box = region(shape=(8,), offset=1 << 33, strides=(1,))
    every = (1 << 33) + np.array([-(1 << 32), -1, 0, 7, 8, 1 << 32])
    assert box.span_of(every) == slice(2, 4)


@given(
    shape=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    offset=st.integers(0, 30),
    row=st.integers(4, 9),
    positions=st.lists(st.integers(0, 80), max_size=40).map(sorted),
)
def test_nothing_outside_the_span_is_in_the_box(
    shape: tuple[int, int], offset: int, row: int, positions: list[int]
) -> None:
    """Boxes of rows, whole and cut: `targets`, which looks at every position, finds the same in the span as in all."""
    box = region(shape=shape, offset=offset, strides=(row, 1))
    every = np.array(positions, np.int64)
    span = box.span_of(every)
    wanted, near = box.targets(torch.from_numpy(every)), box.targets(torch.from_numpy(every[span]))
    if box.num_elements:
        assert near[1].tolist() == wanted[1].tolist()
        assert not wanted[0].numpy()[: span.start].any() and not wanted[0].numpy()[span.stop :].any()
    else:
        assert span.start == span.stop
