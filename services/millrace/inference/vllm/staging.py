"""Stages a version in the workers while the old one serves, and reads back what they hold: in small calls, as none
decodes in them."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from millrace.backoff import Backoff
from millrace.errors import InternalError, UnavailableError
from millrace.inference.vllm.ranks import Ranks, poll, units_of
from millrace.inference.vllm.times import UpdateTimes
from millrace.policies.manifest import PolicyManifest
from millrace.policies.proof import Readback, combine
from millrace.policies.staged import StagedPolicy

_UNIT_BYTES = 16 << 20  # built or looked up between two decode steps: some ten milliseconds
_DIGESTED_BYTES = 64 << 20  # read back between two decode steps: some tenth of a second
_POLLS = Backoff(0.005, 0.1)
_DIGEST_DEADLINE_S = 1800.0  # the digests of a whole model by one thread of each worker

Call = Callable[..., Awaitable[list[Any]]]
"""One call of every worker, by the method's name."""


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
