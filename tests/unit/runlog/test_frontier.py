"""The frontier is a set of ordinals in a compact form; a model of plain sets says what it must do."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import CorruptObjectError, InternalError
from millrace.internal.v1 import batch_pb2
from millrace.runlog.records.frontier import ZERO_CHAIN_HASH, Frontier, chain_hash


@given(st.permutations(range(25)), st.data())
def test_it_is_the_set_of_what_was_resolved(order, data):
    frontier, resolved = Frontier(), set()
    while order:
        size = data.draw(st.integers(0, len(order)))
        part, order = order[:size], order[size:]
        if not part:
            break
        frontier = frontier.resolve(iter(part))
        resolved |= set(part)
        assert all(frontier.is_resolved(ordinal) == (ordinal in resolved) for ordinal in range(30))
        smallest_open = next(ordinal for ordinal in range(30) if ordinal not in resolved)
        assert frontier.resolved_below == smallest_open
        assert frontier.resolved_above == {ordinal for ordinal in resolved if ordinal > smallest_open}


@given(st.sets(st.integers(0, 60)))
def test_it_survives_a_header(ordinals):
    frontier = Frontier().resolve(ordinals)
    header = batch_pb2.BatchHeader(resolved_above=[999])
    frontier.fill(header)
    assert list(header.resolved_above) == sorted(header.resolved_above)
    assert Frontier.from_header(batch_pb2.BatchHeader.FromString(header.SerializeToString())) == frontier


@given(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)))
def test_order_and_grouping_do_not_matter(first, second):
    second = second - first
    together = Frontier().resolve(first | second)
    assert Frontier().resolve(first).resolve(second) == Frontier().resolve(second).resolve(first) == together


def test_nothing_is_resolved_twice():
    frontier = Frontier().resolve([0, 1, 5])
    for wrong in ([1], [5], [7, 7], [-1], [2, 0]):
        with pytest.raises(InternalError, match="resolved twice"):
            frontier.resolve(wrong)
    assert frontier == Frontier(2, frozenset({5})), "a refused resolve must change nothing"


def test_a_corrupt_frontier_is_refused():
    for below, above in ((3, {2}), (3, {3}), (-1, set())):
        with pytest.raises(CorruptObjectError, match="frontier"):
            Frontier(below, frozenset(above))


def test_chain_hash_is_what_the_design_says():
    inner = hashlib.sha256(b"header").digest()
    assert chain_hash(ZERO_CHAIN_HASH, b"header") == hashlib.sha256(bytes(32) + inner).digest()
    assert chain_hash(chain_hash(ZERO_CHAIN_HASH, b"a"), b"b") != chain_hash(chain_hash(ZERO_CHAIN_HASH, b"b"), b"a")
    with pytest.raises(ValueError, match="32"):
        chain_hash(b"", b"header")
