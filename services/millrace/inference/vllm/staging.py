"""Brings a version into the workers while the old one serves: in small calls, as none decodes in them."""

from pathlib import Path

from millrace.errors import InternalError
from millrace.inference.vllm.proofs import Call, Readback, chunks, foresee
from millrace.inference.vllm.ranks import Ranks, units_of
from millrace.inference.vllm.times import UpdateTimes
from millrace.policies.staged import StagedPolicy

_UNIT_BYTES = 16 << 20  # built or looked up between two decode steps: some ten milliseconds


async def bring(
    call: Call, ranks: Ranks, staged: StagedPolicy, *, directory: Path, times: UpdateTimes
) -> Readback | None:
    """Stage a version; what the workers will hold with it, or None if that has to be read back after it is written.

    After an error of theirs the workers keep nothing of it.
    """
    order = await ranks.order(staged, directory)
    times.begin_staging()
    try:
        answers = await call("millrace_stage", order)
        times.count_busy(answer["seconds"] for answer in answers)
        for method, part in (("millrace_gather", "pieces"), ("millrace_prepare", "units")):
            for first, last in chunks(units_of([answer[part] for answer in answers]), _UNIT_BYTES):
                times.count_busy(await call(method, first, last))
        return await foresee(call, staged.manifest)
    except InternalError:
        await call("millrace_discard")
        raise
