"""Names of runs as people type them: `runs/x`, `x`, a unique beginning, a uid, or `-` for the most recent run."""

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from millrace.cli.errors import CliError
from millrace.errors import NotFoundError

if TYPE_CHECKING:
    from millrace.client import RunsClient
    from millrace.v1 import run_pb2


async def resolve(runs: "RunsClient", text: str) -> "run_pb2.Run":
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


def choose(text: str, known: "Sequence[run_pb2.Run]") -> "run_pb2.Run":
    """The run whose uid this is, or the only one whose name begins like this."""
    by_uid = {run.uid: run for run in known}
    uids = {run.name.removeprefix("runs/"): run.uid for run in known}
    missing = f"there is no run {text!r}"
    return by_uid[choose_uid(text, uids, missing=missing, otherwise="see what there is with `millrace run list`")]


def choose_uid(text: str, uids: Mapping[str, str], *, missing: str, otherwise: str) -> str:
    """The uid that is meant among uids by name; errors say `missing`, and `otherwise` where no name is similar."""
    if text in uids:
        return uids[text]
    if text in uids.values():
        return text
    found = sorted(name for name in uids if name.startswith(text))
    if len(found) == 1:
        return uids[found[0]]
    if found:
        raise CliError(
            f"{text!r} begins the names of {len(found)} runs: {', '.join(found[:8])}", hint="type more of it"
        )
    close = difflib.get_close_matches(text, uids, n=3)
    remedy = f"did you mean {' or '.join(close)}?" if close else otherwise
    raise NotFoundError(missing, reason="RUN_NOT_FOUND", remedy=remedy)
