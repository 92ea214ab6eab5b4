"""What is proved of the boxes that a worker holds in the checkpoint's bits, so that a pause does not read all of them.

* `read` digests boxes whole, from the memory. So it is after a load.
* `jobs`, while the old version serves, continues these digests by what a version will write: by the bits that the
  memory has now where elements change, and by the file for boxes that are copied whole. What results is the manifest's
  only if the memory still holds there what was proved, and if nothing is to change but what the version changes. In the
  pause every write is read back and compared with what was written (`memory.Write`), and then these digests hold.
* What is taken on trust meanwhile is that memory which nobody wrote to did not change. Whether that holds is found out
  beside the serving: after each version `read_next` reads everything once more, a share between any two steps.

Digests are computed in a thread, on copies or on the file, so that they delay no step.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from millrace.inference.vllm.orders import OrderFiles
from millrace.inference.vllm.workers.layout import Region
from millrace.inference.vllm.workers.memory import Bits, Write, copy_of, gather, source_of
from millrace.policies.change import TensorChange
from millrace.policies.digest import add_digests, change_digest

SHARE_ELEMENTS = 1 << 20
"""Elements that are digested at a time; copied in some tenth of a millisecond, digested in some six."""

Share = tuple[int, int]
"""A box, by its number, and its share's first element in the tensor."""

Job = tuple[Share, Callable[[int], int]]
"""How a version continues the digest of a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """The digests that the boxes will have with a staged version."""

    digests: Future[dict[Share, int]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Reading:
    """A share that was copied and is being digested. `age` tells whether a version came meanwhile."""

    share: Share
    age: int
    expected: int
    found: Future[int]


class ProvedBoxes:
    """`regions` are in runs and hold the checkpoint's bits; `memory` gives a box of them flat, as bits."""

    def __init__(self, regions: Iterable[Region], memory: Callable[[Region], torch.Tensor]) -> None:
        self._regions = list(dict.fromkeys(regions))
        self._numbers = {region: number for number, region in enumerate(self._regions)}
        self._memory = memory
        self._digests: dict[Share, int] = {}
        self._age = 0
        self._unread: dict[Share, None] = {}
        self._reading: _Reading | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy-digest")

    @property
    def is_known(self) -> bool:
        """Whether every box's digest is known, so that it can be continued."""
        return all((number, first) in self._digests for number, first, _ in self._shares(range(len(self._regions))))

    def read(self, names: Iterable[str]) -> list[list[Any]]:
        """Digest the boxes of these tensors whole; rows as `rows` gives them."""
        wanted = set(names)
        numbers = [number for number, region in enumerate(self._regions) if region.tensor in wanted]
        for number, first, last in self._shares(numbers):
            region = self._regions[number]
            begin, end = region.places(first, last)
            bits = self._memory(region)[begin:end].cpu().numpy()
            self._digests[number, first] = region.digest(bits.view(f"u{bits.itemsize}"), begin)
        return self._rows(numbers, self._digests)

    def begin_digesting(self, jobs: list[Job]) -> Foreseen:
        """Have the digests, which have to be known (`is_known`), continued by `jobs` in the thread."""
        return Foreseen(digests=self._thread.submit(_continue, dict(self._digests), jobs))

    def jobs(self, files: OrderFiles, writes: Iterable[Write]) -> list[Job]:
        """What a version, or a part of one, does to the digests; takes what the memory has now where it changes."""
        jobs: list[Job] = []
        for write in writes:
            number = self._numbers.get(write.region)
            if number is None:
                continue
            if write.index is None:
                source = source_of(files, write.region).reshape(-1).numpy()
                jobs += self._whole(number, source.view(f"u{source.itemsize}"))
            else:
                jobs += self._changed(number, write)
        return jobs

    def rows(self, foreseen: Foreseen) -> list[list[Any]] | None:
        """[tensor, key of the box, elements, digest as hex] of every box; None if they are still being computed."""
        if not foreseen.digests.done():
            return None
        return self._rows(range(len(self._regions)), foreseen.digests.result())

    def begin_writing(self) -> None:
        """What is held is unknown from now on."""
        self._digests, self._age = {}, self._age + 1

    def take(self, foreseen: Foreseen) -> None:
        """The version is written, and every write was read back. All is to be read once more from now on."""
        self._digests = dict(foreseen.digests.result())
        # What waits to be read already goes first, so that no share starves while versions come faster than the reader.
        self._unread |= dict.fromkeys(self._digests)

    def read_next(self) -> tuple[int, str, bool]:
        """Shares that are still to be read back, what is damaged, and whether the rest is proved.

        Takes a copy, whose digest the next call has.
        """
        reading = self._reading
        if reading is not None:
            if not reading.found.done():
                return len(self._unread), "", True
            self._reading = None
            region = self._regions[reading.share[0]]
            if reading.found.result() != reading.expected:
                problem = (
                    f"{region.tensor} is damaged in the engine's memory: elements from {reading.share[1]} on are not "
                    f"those that were proved"
                )
                return len(self._unread), problem, False
            if reading.age == self._age:
                self._unread.pop(reading.share, None)
        share = next(iter(self._unread), None)
        expected = None if share is None else self._digests.get(share)
        if share is None or expected is None:  # all is read, or nothing is proved
            self._unread.clear()
            return 0, "", self.is_known
        region = self._regions[share[0]]
        begin, end = region.places(share[1], self._end_of(region, share[1]))
        bits = copy_of(self._memory(region), begin, end)
        found = self._thread.submit(region.digest, bits, begin)
        self._reading = _Reading(share=share, age=self._age, expected=expected, found=found)
        return len(self._unread), "", True

    def _whole(self, number: int, source: Bits) -> list[Job]:
        region = self._regions[number]
        places = [(first, *region.places(first, last)) for _, first, last in self._shares([number])]
        return [((number, first), _digest_of(region, source[begin:end], begin)) for first, begin, end in places]

    def _changed(self, number: int, write: Write) -> list[Job]:
        region = self._regions[number]
        assert write.positions is not None and write.bits is not None
        jobs: list[Job] = []
        change = TensorChange(bits=write.bits, positions=write.positions)
        flat = self._memory(region)
        for first, part in change.shares(SHARE_ELEMENTS):
            assert part.positions is not None
            old = gather(flat, region.places_of(part.positions))
            jobs.append(((number, max(first, region.source_offset)), _continued(part, old)))
        return jobs

    def _shares(self, numbers: Iterable[int]) -> Iterable[tuple[int, int, int]]:
        """(box, first, last) of every share: boxes are cut at multiples of `SHARE_ELEMENTS` of the tensor."""
        for number in numbers:
            region, first = self._regions[number], self._regions[number].source_offset
            while first < region.end:
                yield number, first, (first := self._end_of(region, first))

    def _end_of(self, region: Region, first: int) -> int:
        end = (first // SHARE_ELEMENTS + 1) * SHARE_ELEMENTS
        return min(end, region.end)

    def _rows(self, numbers: Iterable[int], digests: Mapping[Share, int]) -> list[list[Any]]:
        rows: list[list[Any]] = []
        for number in numbers:
            region = self._regions[number]
            whole = add_digests(digests[number, first] for _, first, _ in self._shares([number]))
            key = f"{region.source_offset}:{region.shape}"
            rows.append([region.tensor, key, region.num_elements, f"{whole:032x}"])
        return rows


def _continue(digests: dict[Share, int], jobs: list[Job]) -> dict[Share, int]:
    for share, job in jobs:
        digests[share] = job(digests[share])
    return digests


def _digest_of(region: Region, bits: Bits, begin: int) -> Callable[[int], int]:
    return lambda _: region.digest(bits, begin)


def _continued(change: TensorChange, old: Bits) -> Callable[[int], int]:
    return lambda digest: change_digest(digest, change, old)
