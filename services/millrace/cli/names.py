"""Names of runs as people type them: `runs/x`, `x`, a unique beginning, a uid, or `-` for the most recent run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from millrace.errors import NotFoundError
from millrace.runlog import run_name

if TYPE_CHECKING:
    from millrace.client import RunsClient
    from millrace.v1 import run_pb2


async def resolve(runs: "RunsClient", text: str) -> "run_pb2.Run":
    """The run that is meant; NotFoundError with a did-you-mean, InvalidSpecError if several begin like this."""
    if text == "-":
        return choose(text, await runs.list(limit=1))
    try:
        return await runs.get(f"runs/{text.removeprefix('runs/')}")
    except NotFoundError:
        return choose(text, await runs.list())


def choose(text: str, known: "Sequence[run_pb2.Run]") -> "run_pb2.Run":
    """The run that is meant, of those that are known."""
    by_name = {run.name.removeprefix("runs/"): run for run in known}
    return by_name[run_name.resolve(text, {name: run.uid for name, run in by_name.items()})]
