"""Proofs of the bits that an engine holds in this process's memory: what is read back, and when.

* A version that was written whole is read back whole, every element of every tensor, before it serves.
* A version that came as changes on top of a proved one is proved by its changed positions. `prepare`, while the old
  version serves, reads the old bits there from the engine's memory and continues the proved digests with them: they
  become the manifest's only if the memory still holds there what was proved, and if nothing is to change but what the
  version changes. `prove`, in the pause, reads the positions once more and compares them with the version, bit by bit.
* So what is taken on trust when such a version begins to serve is that memory which nobody wrote to did not change
  since it was proved. Whether that holds is found out beside the serving: after each such version everything is read
  back once more, in slices with rests between them. Damage is reported, and the engine fails.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from millrace.errors import InternalError
from millrace.policies.change import TensorChange
from millrace.policies.digest import (
    SHARE_ELEMENTS,
    add_digests,
    bits_digest,
    change_digest,
    digest_hex,
    policy_digest,
    share_digests,
)
from millrace.policies.staged import StagedPolicy

logger = logging.getLogger(__name__)

_SLICE_ELEMENTS = 1 << 18  # some two milliseconds: the longest that a write waits for the reader beside it
_REST = 4.0  # the reader rests this many times as long as it read, so it takes a fifth of a processor at most

Bits = NDArray[np.unsignedinteger]
_Shares = dict[tuple[str, int], int]


class Readback:
    """The digests of what one model holds. `bits` are its weights' own memory, by name; only the `write` methods
    change it.

    `report` is told of damage that the reader beside the serving finds, in the reader's thread, once at most.
    `prepare`, a `write` and `prove` come one after the other, from any thread.
    """

    def __init__(self, bits: Mapping[str, Bits], *, report: Callable[[str], None]) -> None:
        self._bits = bits
        self._report = report
        self._proved: _Shares = {}
        """Of what is held; empty while that is unknown."""
        self._next: tuple[StagedPolicy, _Shares, str] | None = None
        """A prepared version, its digests, and the whole policy's."""
        self._lock = threading.Lock()
        self._num_writes = 0
        self._unread: dict[tuple[str, int], None] = {}
        """Shares that are to be read back beside the serving, in this order."""
        self._reader: threading.Thread | None = None
        self._closing = threading.Event()

    @property
    def num_unread(self) -> int:
        """Shares that were not read back yet since the last version that came as changes."""
        with self._lock:
            return len(self._unread)

    def prepare(self, staged: StagedPolicy) -> None:
        """Continue the proved digests by what a version changes, from the old bits in the memory; write nothing."""
        self._next = None
        if staged.changes is None or not self._proved:
            return
        digests = dict(self._proved)
        for name, parts in staged.changes.items():
            for change in parts:
                for first, part in change.shares(SHARE_ELEMENTS):
                    digests[name, first] = change_digest(digests[name, first], part, part.old_bits(self._bits[name]))
        self._next = staged, digests, _policy_digest(staged, digests)

    def write_changes(self, staged: StagedPolicy, write: Callable[[], None]) -> None:
        """Have `write` put a version's changes into the memory. What is held is unknown from then on, until `prove`."""
        if self._next is None or self._next[0] is not staged:
            self.prepare(staged)
        if self._next is None:
            self.write_unproved(write)
            return
        with self._lock:
            self._num_writes += 1
            self._proved = {}
            write()

    def write_unproved(self, write: Callable[[], None]) -> None:
        """Have `write` change the memory in a way that only reading everything back can prove."""
        self._next = None
        with self._lock:
            self._num_writes += 1
            self._proved = {}
            self._unread.clear()
            write()

    def prove(self, staged: StagedPolicy) -> str:
        """The digest (hex) of what is held; InternalError if changed positions hold other bits than the version's."""
        prepared, self._next = self._next, None
        if prepared is None or prepared[0] is not staged:
            digests = share_digests({name: self._bits[name] for name in staged.tensors})
            found = _policy_digest(staged, digests)
        else:
            assert staged.changes is not None
            for name, parts in staged.changes.items():
                self._require_written(name, parts)
            _, digests, found = prepared
        with self._lock:
            self._proved = digests if found == staged.manifest.digest else {}
            if self._proved and prepared is not None:
                self._read_beside()
        return found

    def close(self) -> None:
        """End the reader, within a slice."""
        self._closing.set()

    def _require_written(self, name: str, parts: tuple[TensorChange, ...]) -> None:
        for change in parts:
            wrong = int(np.count_nonzero(change.old_bits(self._bits[name]) != change.bits))
            if wrong:
                raise InternalError(
                    f"the engine holds other bits than were written at {wrong} of {change.num_elements} changed "
                    f"positions of {name}",
                    reason="POLICY_READBACK_MISMATCH",
                    remedy="the policy is loaded anew",
                )

    def _read_beside(self) -> None:
        """Have everything read back beside the serving. What waits for it already goes first: nothing starves."""
        self._unread |= dict.fromkeys(self._proved)
        if self._reader is None and not self._closing.is_set():
            self._reader = threading.Thread(target=self._read, name="policy-readback", daemon=True)
            self._reader.start()

    def _read(self) -> None:
        """The reader's thread, while anything is to be read."""
        while True:
            with self._lock:
                share = next(iter(self._unread), None)
                expected = None if share is None else self._proved.get(share)
                if share is None or expected is None or self._closing.is_set():
                    self._reader = None  # under the lock: from here on the next proof starts another one
                    return
                num_writes = self._num_writes
            found = self._read_share(share, num_writes)
            if found is None:
                continue  # written to meanwhile
            if found != expected:
                self.close()
                self._report(
                    f"{share[0]} is damaged in the engine's memory: elements from {share[1]} on are not those "
                    f"that were proved"
                )
            with self._lock:
                if num_writes == self._num_writes:
                    del self._unread[share]
                    if not self._unread:
                        logger.info("all weights are read back and as they were proved")

    def _read_share(self, share: tuple[str, int], num_writes: int) -> int | None:
        """The digest of a share as the memory holds it; None if something was written meanwhile."""
        name, first = share
        bits, digest = self._bits[name], 0
        last = min(first + SHARE_ELEMENTS, bits.size)
        for begin in range(first, last, _SLICE_ELEMENTS):
            with self._lock:
                if num_writes != self._num_writes or self._closing.is_set():
                    return None
                began = time.monotonic()
                part = bits_digest(bits[begin : min(begin + _SLICE_ELEMENTS, last)], start=begin)
            digest = add_digests((digest, part))
            self._closing.wait(_REST * (time.monotonic() - began))
        return digest


def _policy_digest(staged: StagedPolicy, shares: _Shares) -> str:
    sums: dict[str, int] = {}
    for (name, _), digest in shares.items():
        sums[name] = add_digests((sums.get(name, 0), digest))
    return policy_digest(
        {name: (tensor.dtype, tensor.shape, digest_hex(sums[name])) for name, tensor in staged.tensors.items()}
    )
