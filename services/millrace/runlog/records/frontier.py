"""Which task ordinals are resolved (trained or dropped), and the chain hash over the headers that resolved them."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from millrace.errors import CorruptObjectError, InternalError
from millrace.internal.v1 import batch_pb2

ZERO_CHAIN_HASH = bytes(32)
"""The parent of a genesis hash that continues nothing."""


def genesis_hash(parent: bytes, run_json: bytes) -> bytes:
    """Return the start of a run's chain: sha256(`parent` || sha256(run.json)), so that it covers what the run is.

    `parent` is the chain hash that a fork continues, else 32 zero bytes; `run_json` are the stored bytes.
    """
    return chain_hash(parent, run_json)


def chain_hash(previous: bytes, header_bytes: bytes) -> bytes:
    """Return h(n) = sha256(H(n-1) || sha256(header n)); `header_bytes` are the stored bytes, never re-serialized."""
    if len(previous) != 32:
        raise ValueError(f"a chain hash has 32 bytes, not {len(previous)}")
    return hashlib.sha256(previous + hashlib.sha256(header_bytes).digest()).digest()


@dataclass(frozen=True, slots=True)
class Frontier:
    """The set of resolved ordinals: everything below `resolved_below`, plus a sparse set above it. Immutable.

    Its size is bounded by how far groups finish out of order, which `orchestrator/play/routing.py` bounds.
    """

    resolved_below: int = 0
    """Every ordinal below it is resolved; it itself is not."""
    resolved_above: frozenset[int] = frozenset()
    """The resolved ordinals above `resolved_below`."""

    def __post_init__(self) -> None:
        if self.resolved_below < 0 or any(ordinal <= self.resolved_below for ordinal in self.resolved_above):
            raise CorruptObjectError(
                f"frontier: resolved_above {sorted(self.resolved_above)[:8]} is not above {self.resolved_below}",
                reason="FRONTIER_CORRUPT",
                remedy="the header that carries it was written by a faulty orchestrator: report it",
            )

    @classmethod
    def from_header(cls, header: batch_pb2.BatchHeader) -> "Frontier":
        """Return the frontier after a committed header."""
        return cls(header.resolved_below, frozenset(header.resolved_above))

    def is_resolved(self, ordinal: int) -> bool:
        """Return whether the ordinal was trained or dropped."""
        return ordinal < self.resolved_below or ordinal in self.resolved_above

    def resolve(self, ordinals: Iterable[int]) -> "Frontier":
        """Return the frontier with these ordinals resolved too; `InternalError` if one of them is already.

        That check is the last guard of "nothing is counted twice".
        """
        new = list(ordinals)
        fresh = frozenset(new)
        wrong = sorted(ordinal for ordinal in fresh if ordinal < 0 or self.is_resolved(ordinal))
        if wrong or len(fresh) != len(new):
            raise InternalError(
                f"ordinals {(wrong or sorted(new))[:8]} are negative or would be resolved twice",
                reason="ORDINAL_RESOLVED_TWICE",
                remedy="report this: the orchestrator counted a group twice",
            )
        below, above = self.resolved_below, self.resolved_above | fresh
        while below in above:
            below += 1
        return Frontier(below, frozenset(ordinal for ordinal in above if ordinal > below))

    def fill(self, header: batch_pb2.BatchHeader) -> None:
        """Write the frontier into a header."""
        header.resolved_below = self.resolved_below
        del header.resolved_above[:]
        header.resolved_above.extend(sorted(self.resolved_above))
