"""Proof that an engine holds a policy version, bit for bit.

* `held_digest` reads all of the memory back. The embedded engine does so with every version before it serves.
* `ContinuedDigests` are for an engine whose pause must not grow with the model (vLLM). While the old version serves,
  the digests of the new one are continued from the proved ones: from the bits that the memory has now where elements
  change, and from the file where a part is copied whole. They become the manifest's only if the memory still holds
  there what was proved, and if nothing is to change but what the version changes. In the pause every write is read
  back and compared with what was written; then the continued digests hold.
* What is taken on trust meanwhile is that memory which nobody wrote to did not change. Background verification finds
  out whether that is so: after each version all parts are read once more, a share between any two decode steps.

Digests are computed in a thread, on copies or on the file, so that they delay no step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from millrace.errors import InternalError
from millrace.policies.digest import add_digests, change_digest, digest_hex, policy_digest, tensor_digests
from millrace.policies.manifest import PolicyManifest
from millrace.policies.tensors import TensorBytes, TensorChange

MISMATCH = "POLICY_READBACK_MISMATCH"
"""Reason of an error that says that the engine holds other bits than it should."""

# Elements that are digested at a time: copied in some tenth of a millisecond, digested in some six.
SHARE_ELEMENTS = 1 << 20

Bits = NDArray[np.unsignedinteger]
Row = Sequence[Any]
"""[tensor, key of the part, elements, digest as hex]: what a worker tells of a part."""
# A part, by its number, and the first element of its share in the tensor.
_Share = tuple[int, int]


class HeldPart(Protocol):
    """The part of a tensor that one worker holds. Its own elements are numbered from 0, in the tensor's order."""

    @property
    def tensor(self) -> str:
        """Return the tensor's name."""
        ...

    @property
    def key(self) -> str:
        """Return the part's name among the parts of its tensor, which is the same in all workers that hold it."""
        ...

    @property
    def num_elements(self) -> int:
        """Return the number of elements of the part."""
        ...

    @property
    def source_offset(self) -> int:
        """Return the row-major index in the tensor of the part's first element."""
        ...

    @property
    def end(self) -> int:
        """Return the row-major index in the tensor after the part's last element."""
        ...

    def places(self, first: int, last: int) -> tuple[int, int]:
        """Return which of the part's elements, [begin, end) in it, are among the tensor's elements [first, last)."""
        ...

    def places_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices in the part of the tensor's elements at the row-major indices `positions`, both [N].

        All of them must be in the part.
        """
        ...

    def digest(self, bits: Bits, begin: int) -> int:
        """Return what elements of the part add to the tensor's digest; `begin` is the first one's index in the part."""
        ...


P = TypeVar("P", bound=HeldPart)
P_read = TypeVar("P_read", bound=HeldPart, contravariant=True)


class HeldMemory(Protocol[P_read]):
    """Reads the memory in which the parts are. What is returned is a copy, in this process's own memory."""

    def read(self, part: P_read, begin: int, end: int) -> Bits:
        """Return a copy of the bits of the part's elements [begin, end)."""
        ...

    def gather(self, part: P_read, index: NDArray[np.int64]) -> Bits:
        """Return a copy of the bits of the part's elements at `index` [N]."""
        ...

    def digest(self, part: P_read, begin: int, end: int) -> int:
        """Return the digest of the part's elements [begin, end), computed where they are, without a copy."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Readback:
    """Tensors that were read back whole, and whether these are all."""

    names: tuple[str, ...]
    is_whole: bool


def held_digest(tensors: Mapping[str, TensorBytes]) -> str:
    """Return the digest (hex) of the policy that consists of these tensors, computed from all their bits."""
    found = tensor_digests({name: tensor.bits() for name, tensor in tensors.items()})
    return policy_digest({name: (t.dtype, t.shape, digest_hex(found[name])) for name, t in tensors.items()})


def combine(ranks: Iterable[Iterable[Row]], manifest: PolicyManifest) -> Readback:
    """Return which of the manifest's tensors are proved by the ranks' digests, whose parts are summed by tensor.

    `ranks` has for each rank a row [tensor, key of the part, number of elements, digest (hex)] for each part that it
    holds. A part that several ranks hold counts once. Tensors of which parts are missing are left out. Raises
    InternalError if a whole tensor has another digest than the manifest's, or ranks hold different bits of a part.
    """
    parts: dict[str, dict[str, tuple[int, str]]] = {}
    for rows in ranks:
        for name, key, count, digest in rows:
            # Ranks with a copy of the same part must agree; the part counts once.
            if parts.setdefault(name, {}).setdefault(key, (count, digest)) != (count, digest):
                raise mismatch(f"two ranks hold different bits of {name}")
    names: list[str] = []
    for entry in manifest.tensors:
        found = list(parts.get(entry.name, {}).values())
        # Not all parts are here, as in a pipeline of which one stage was read: the tensor's digest is unknown.
        if not found or sum(count for count, _ in found) != entry.num_elements:
            continue
        held = digest_hex(add_digests(int(digest, 16) for _, digest in found))
        if held != entry.digest:
            raise mismatch(f"the engine holds digest {held} for {entry.name}, not {entry.digest}")
        names.append(entry.name)
    return Readback(names=tuple(names), is_whole=len(names) == len(manifest.tensors))


def mismatch(problem: str) -> InternalError:
    """Make the error of an engine that holds other bits than it should; `problem` says which."""
    return InternalError(problem, reason=MISMATCH, remedy="the policy is loaded anew")


class NextDigests(Generic[P]):
    """The digests that the parts will have with the version that is staged.

    Every write is added before `compute`, while the memory still has the old bits.
    """

    def __init__(self, current: "ContinuedDigests[P]") -> None:
        """Begin to continue the digests of the version that the engine holds to those of the staged one."""
        self._current = current
        self._jobs: list[tuple[_Share, Callable[[int], int]]] = []
        self._found: Future[dict[_Share, int]] | None = None

    def add_whole(self, part: P, bits: Bits) -> None:
        """Add a part that will be written whole with `bits`, which must not change until the digests are computed."""
        for share, first, last in self._current.shares_of(part):
            begin, end = part.places(first, last)
            self._jobs.append((share, partial(_whole, part, bits[begin:end], begin)))

    def add_change(self, part: P, change: TensorChange) -> None:
        """Add elements of a part that will be written; positions of `change` count in the tensor.

        Call it while the memory still has the old bits, which are read here.
        """
        for share, inside, old in self._current.old_bits(part, change):
            self._jobs.append((share, partial(_continued, inside, old)))

    def compute(self) -> None:
        """Start to compute the digests of everything added, in a thread; later calls do nothing."""
        if self._found is None:
            self._found = self._current.submit(self._jobs)
            self._jobs = []

    def rows(self) -> list[Row] | None:
        """Return a row [tensor, key of the part, number of elements, digest (hex)] of every part, as it will be when
        staged.

        None while the digests are being computed, and before `compute`.
        """
        # The caller asks between decode steps, which must not wait for a digest.
        if self._found is None or not self._found.done():
            return None
        return self._current.rows_of(self._found.result())

    def result(self) -> dict[_Share, int]:
        """Wait for the digests that `compute` has begun, and return them by share of a part; blocks."""
        assert self._found is not None
        return self._found.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """A share that was copied for verification, and is being digested."""

    share: _Share
    expected: int
    found: Future[int]


class ContinuedDigests(Generic[P]):
    """What is proved of the parts that a worker holds. Parts that are given twice are one."""

    def __init__(self, parts: Iterable[P], memory: HeldMemory[P]) -> None:
        """Begin with nothing known of `parts`, which `memory` reads; equal parts count once."""
        self._parts = list(dict.fromkeys(parts))
        self._numbers = {part: number for number, part in enumerate(self._parts)}
        self._memory = memory
        self._proved: dict[_Share, int] = {}
        """Empty while what is held is unknown."""
        self._unverified: dict[_Share, None] = {}
        self._reading: _Reading | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy-digest")

    @property
    def is_known(self) -> bool:
        """Return whether every part's digest is proved, so that it can be continued to the next version."""
        return all(share in self._proved for part in self._parts for share, _, _ in self.shares_of(part))

    def read(self, names: Iterable[str]) -> list[Row]:
        """Compute the digests of the parts of the tensors `names` from the memory, and keep them as proved.

        Returns a row for each part: tensor, key of the part, number of elements, and digest (hex).
        """
        wanted = set(names)
        parts = [part for part in self._parts if part.tensor in wanted]
        for part in parts:
            for share, first, last in self.shares_of(part):
                begin, end = part.places(first, last)
                self._proved[share] = self._memory.digest(part, begin, end)
        return self._rows(parts, self._proved)

    def next(self) -> NextDigests[P] | None:
        """Begin to continue the proved digests to the next version; None if some are not proved."""
        return NextDigests(self) if self.is_known else None

    def begin_writing(self) -> None:
        """Discard all proofs, because the memory is about to be written to."""
        self._proved, self._reading = {}, None

    def accept(self, following: NextDigests[P]) -> None:
        """Take the digests of `following` as proved: its version is written, and every write was read back.

        From now on background verification reads all parts again.
        """
        self._proved = dict(following.result())
        # What waits for verification already goes first: no share starves while versions come faster than it.
        self._unverified |= dict.fromkeys(self._proved)

    def verify_next(self) -> tuple[int, str, bool]:
        """Start to verify the next share of the parts in the background, and return the result of the one before.

        Returns the number of shares that are not verified yet, what is damaged in words (empty if nothing was found),
        and whether the proofs still hold: False if the share before was damaged or nothing is proved. While the one
        before is still being digested, no share is started.
        """
        if self._reading is not None:
            reading = self._reading
            if not reading.found.done():
                return len(self._unverified), "", True
            self._reading = None
            self._unverified.pop(reading.share, None)
            if reading.found.result() != reading.expected:
                number, first = reading.share
                problem = f"elements from {first} on are not those that were proved"
                problem = f"{self._parts[number].tensor} is damaged in the engine's memory: {problem}"
                return len(self._unverified), problem, False
        share = next(iter(self._unverified), None)
        expected = None if share is None else self._proved.get(share)
        if share is None or expected is None:  # all is verified, or nothing is proved
            self._unverified.clear()
            return 0, "", self.is_known
        part = self._parts[share[0]]
        # Copied here, between two decode steps; the thread digests the copy while the engine goes on.
        begin, end = part.places(share[1], _end_of(part, share[1]))
        found = self._thread.submit(part.digest, self._memory.read(part, begin, end), begin)
        self._reading = _Reading(share=share, expected=expected, found=found)
        return len(self._unverified), "", True

    def shares_of(self, part: P) -> Iterable[tuple[_Share, int, int]]:
        """Yield the shares of a part, each with its range [first, last) of elements in the tensor.

        They are cut at the multiples of `SHARE_ELEMENTS` in the tensor. Nothing is yielded for a part that is not held
        here.
        """
        number, first = self._numbers.get(part), part.source_offset
        while number is not None and first < part.end:
            yield (number, first), first, (first := _end_of(part, first))

    def old_bits(self, part: P, change: TensorChange) -> Iterable[tuple[_Share, TensorChange, Bits]]:
        """Yield a change of a part share by share: the share, its piece of the change, and the memory's bits there."""
        if (number := self._numbers.get(part)) is None:
            return
        for first, inside in change.shares(SHARE_ELEMENTS):
            assert inside.positions is not None
            old = self._memory.gather(part, part.places_of(inside.positions))
            yield (number, max(first, part.source_offset)), inside, old

    def submit(self, jobs: Sequence[tuple[_Share, Callable[[int], int]]]) -> Future[dict[_Share, int]]:
        """Start `jobs` in the thread; return a future of the digests by share, the proved ones continued by the jobs.

        A job is a share, and a function from its digest before to the one after.
        """
        return self._thread.submit(_continue, dict(self._proved), jobs)

    def rows_of(self, digests: Mapping[_Share, int]) -> list[Row]:
        """Return a row [tensor, key of the part, number of elements, digest (hex)] of every part.

        `digests` has those of all shares, which are summed by part.
        """
        return self._rows(self._parts, digests)

    def _rows(self, parts: Iterable[P], digests: Mapping[_Share, int]) -> list[Row]:
        """Return the rows of `parts`: tensor, key, number of elements, and digest (hex), the sum of its shares'."""
        rows: list[Row] = []
        for part in parts:
            whole = add_digests(digests[share] for share, _, _ in self.shares_of(part))
            rows.append([part.tensor, part.key, part.num_elements, digest_hex(whole)])
        return rows


def _end_of(part: HeldPart, first: int) -> int:
    """Return where the share of a part that begins at element `first` of the tensor ends."""
    return min((first // SHARE_ELEMENTS + 1) * SHARE_ELEMENTS, part.end)


def _continue(digests: dict[_Share, int], jobs: Sequence[tuple[_Share, Callable[[int], int]]]) -> dict[_Share, int]:
    """Replace the digest of each job's share by what the job returns for it, in place; return `digests`."""
    for share, job in jobs:
        digests[share] = job(digests[share])
    return digests


def _whole(part: HeldPart, bits: Bits, begin: int, digest: int) -> int:
    """Return the digest of `bits`, which replace a share of the part from its element `begin` on.

    `digest` is ignored.
    """
    return part.digest(bits, begin)


def _continued(change: TensorChange, old: Bits, digest: int) -> int:
    """Return the digest after a change from `digest`, the one before; `old` are the bits that it replaces."""
    return change_digest(digest, change, old)
