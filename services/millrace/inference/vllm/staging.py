"""Stages a version in the workers while the old one serves, and reads back what they hold: in small calls, as none
decodes in them."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from millrace.backoff import Backoff
from millrace.errors import InternalError, UnavailableError
from millrace.inference.vllm.ranks import Ranks, poll, units_of
from millrace.policies.manifest import PolicyManifest, StagedPolicy
from millrace.policies.proof import Readback, combine
from millrace.telemetry import waits

_UNIT_BYTES = 16 << 20  # built or looked up between two decode steps: some ten milliseconds
_DIGESTED_BYTES = 64 << 20  # read back between two decode steps: some tenth of a second
_POLLS = Backoff(0.005, 0.1)
_DIGEST_DEADLINE_S = 1800.0  # the digests of a whole model by one thread of each worker

Call = Callable[..., Awaitable[list[Any]]]
"""One call of every worker, by the method's name."""


# Where the time of an update goes: the part in which the engine stands still, and the one in which answers wait.


# Background verification: while a version serves, the workers read all of their weights once more.
#
# Between two steps a worker only copies a share, in some tenth of a millisecond; a thread digests it
# (`policies/proof.py`). A call that fails is made again, less and less often; as long as that lasts it is a wait of
# the replica.

_REST = 4.0  # rests this many times as long as a call took, which waits for a step to end
_MIN_REST_S = 0.02  # longer than a share's digest takes: a fifth of one processor at most
BACKOFF = Backoff(1.0, 60.0)
_OVERDUE_S = 600.0  # so long unverified weights serve, then the wait counts as overdue


class BackgroundVerifier:
    """`call` asks every worker for a step; `is_free` says whether a step delays nobody; `report` is told of damage."""

    def __init__(
        self,
        call: Callable[[], Awaitable[list[Any]]],
        *,
        is_free: Callable[[], bool],
        report: Callable[[str], Awaitable[None]],
    ) -> None:
        self._call = call
        self._is_free = is_free
        self._report = report
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin, or go on, until all is verified; call it after each version."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="vLLM verification")

    def stop(self) -> None:
        """Verify no more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        began_all, num_failed, wait = time.monotonic(), 0, waits.LastingWait()
        try:
            while True:
                took = 0.0
                if self._is_free():
                    began = time.monotonic()
                    try:
                        answers = await self._call()
                    except Exception as error:  # whatever it is, what serves must be verified
                        num_failed += 1
                        retry_s = BACKOFF.after(num_failed)
                        what = f"weights to be verified in the background, which fails: {error}"
                        wait.on(what, waits_on="inference", key="verification", deadline_s=_OVERDUE_S)
                        logger.warning("the weights cannot be verified now", extra={"retry_s": retry_s}, exc_info=True)
                        await asyncio.sleep(retry_s)
                        continue
                    wait.over()
                    num_failed, took = 0, time.monotonic() - began
                    if await self._is_over(answers, began_all):
                        return
                await asyncio.sleep(max(_MIN_REST_S, _REST * took))
        finally:
            wait.over()

    async def _is_over(self, answers: list[Any], began: float) -> bool:
        """Whether nothing is to be verified any more; reports damage."""
        if problem := next((problem for _, problem, _ in answers if problem), ""):
            logger.error("the engine's memory is damaged", extra={"error": problem})
            await self._report(problem)
            return True
        if any(left for left, _, _ in answers):
            return False
        if all(is_proved for *_, is_proved in answers):
            took = round(time.monotonic() - began, 1)
            logger.info("all weights are verified", extra={"seconds": took})
        else:
            logger.warning("the weights are not verified in the background: what they should be is not known")
        return True


logger = logging.getLogger(__name__)


class UpdateTimes:
    """Notes when each part of an update ends, and logs them together.

    `standstill_s` is from the order to pause, which waits for the running step, until vLLM goes on. `held_s` is from
    the same moment until the version is proved and the gate opens: so long no request begins and no answer leaves.
    `busy_s` is what decoding stood still for while the version was staged, in many parts of `longest_busy_s` at most.
    """

    def __init__(self) -> None:
        self.prepare_s = self.busy_s = self.longest_busy_s = 0.0
        self.standstill_s: float | None = None
        self._began: float | None = None
        self._last = 0.0
        self._parts: dict[str, float] = {}

    def begin_staging(self) -> None:
        """The workers are about to be given a version."""
        self.busy_s = self.longest_busy_s = 0.0

    def count_busy(self, seconds: Iterable[float]) -> None:
        """The workers took so long for a call, side by side, in which they did not decode."""
        longest = max(seconds, default=0.0)
        self.busy_s += longest
        self.longest_busy_s = max(self.longest_busy_s, longest)

    def begin(self) -> None:
        """The engine is about to be paused."""
        self._began = self._last = time.monotonic()
        self.standstill_s, self._parts = None, {}

    def mark(self, part: str) -> None:
        """A part of the update has ended."""
        now = time.monotonic()
        self._parts[f"{part}_s"] = self._parts.get(f"{part}_s", 0.0) + now - self._last
        self._last = now

    def go_on(self) -> None:
        """The engine goes on, if it had not before."""
        if self._began is not None and self.standstill_s is None:
            self.standstill_s = time.monotonic() - self._began

    def end(self) -> None:
        """The update is over, well or not."""
        self.go_on()
        self._began = None

    def report(self, version: int) -> None:
        """The gate is open; logs everything."""
        if self._began is None:  # a load, during which nothing was served
            return
        held_s = time.monotonic() - self._began
        parts = {name: round(seconds, 4) for name, seconds in self._parts.items()}
        whole = {"held_s": round(held_s, 4), "standstill_s": round(self.standstill_s or 0.0, 4)}
        extra = {"version": version, **whole, "prepare_s": round(self.prepare_s, 4), **parts}
        extra |= {"busy_s": round(self.busy_s, 4), "longest_busy_s": round(self.longest_busy_s, 4)}
        logger.info("policy applied and proved", extra=extra)


async def stage(
    call: Call, ranks: Ranks, staged: StagedPolicy, *, directory: Path, times: UpdateTimes
) -> Readback | None:
    """Stage a version; what the workers will hold with it, or None if that has to be read back after it is written.

    InternalError if what they hold now is not what was proved. After an error of theirs they keep nothing of it.
    """
    order = await ranks.order(staged, directory)
    times.begin_staging()
    try:
        answers = await call("millrace_stage", order)
        times.count_busy(answer["seconds"] for answer in answers)
        for method, part in (("millrace_gather", "slices"), ("millrace_prepare", "units")):
            for first, last in _chunks(units_of([answer[part] for answer in answers]), _UNIT_BYTES):
                times.count_busy(await call(method, first, last))
        return await _foresee(call, staged.manifest)
    except InternalError:
        await call("millrace_discard")
        raise


async def read_back(call: Call, manifest: PolicyManifest) -> Readback:
    """What the workers hold in the checkpoint's bits, read whole, some of it between any two decode steps.

    Of an adapter nothing: its tensors have no place in the model, and the base was proved when it was loaded.
    """
    if manifest.adapter is not None:
        return Readback(names=(), is_whole=False)
    found: list[Any] = []
    for first, last in _chunks([tensor.size_bytes for tensor in manifest.tensors], _DIGESTED_BYTES):
        found += await call("millrace_digests", [tensor.name for tensor in manifest.tensors[first:last]])
    return combine(found, manifest)


async def _foresee(call: Call, manifest: PolicyManifest) -> Readback | None:
    answers = await poll(
        lambda: call("millrace_foreseen"),
        lambda answers: not any(answer["is_pending"] for answer in answers),
        what="vLLM's workers to digest the policy",
        deadline_s=_DIGEST_DEADLINE_S,
        rests=_POLLS,
        late=UnavailableError(
            f"vLLM's workers did not digest the policy within {_DIGEST_DEADLINE_S:.0f} s",
            reason="ENGINE_SILENT",
            remedy="restart it",
        ),
    )
    if any(answer["rows"] is None for answer in answers):
        return None
    return combine([answer["rows"] for answer in answers], manifest)


def _chunks(sizes: list[int], limit: int) -> list[tuple[int, int]]:
    """Consecutive [first, last) of items, each of about `limit` and at least one item."""
    found: list[tuple[int, int]] = []
    first = total = 0
    for index, size in enumerate(sizes):
        if index > first and total + size > limit:
            found.append((first, index))
            first, total = index, 0
        total += size
    return [*found, (first, len(sizes))] if sizes else []
