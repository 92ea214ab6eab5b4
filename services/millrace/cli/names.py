"""Names of runs as people type them: `runs/x`, `x`, a unique beginning, a uid, or `-` for the most recent run."""

import difflib
from collections.abc import Sequence

from millrace.cli.errors import CliError
from millrace.client import RunsClient
from millrace.errors import NotFoundError
from millrace.v1 import run_pb2


async def resolve(runs: RunsClient, text: str) -> run_pb2.Run:
    """The run that is meant; NotFoundError with a did-you-mean, CliError if several begin like this."""
    if text == "-":
        newest = await runs.list(limit=1)
        if not newest:
            raise NotFoundError(
                "there is no run yet",
                reason="RUN_NOT_FOUND",
                remedy="submit one: millrace run submit @ examples/reverse_text/rl.toml",
            )
        return newest[0]
    short = text.removeprefix("runs/")
    try:
        return await runs.get(f"runs/{short}")
    except NotFoundError:
        known = await runs.list()
    return choose(short, known)


def choose(text: str, known: Sequence[run_pb2.Run]) -> run_pb2.Run:
    """The run whose uid this is, or the only one whose name begins like this."""
    by_name = {run.name.removeprefix("runs/"): run for run in known}
    for run in known:
        if run.uid == text:
            return run
    found = [name for name in by_name if name.startswith(text)]
    if len(found) == 1:
        return by_name[found[0]]
    if found:
        raise CliError(
            f"{text!r} begins the names of {len(found)} runs: {', '.join(sorted(found)[:8])}", hint="type more of it"
        )
    close = difflib.get_close_matches(text, by_name, n=3)
    raise NotFoundError(
        f"there is no run {text!r}",
        reason="RUN_NOT_FOUND",
        remedy=f"did you mean {' or '.join(close)}?" if close else "see what there is with `millrace run list`",
    )
