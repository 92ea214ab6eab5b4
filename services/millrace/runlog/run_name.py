"""How runs are named: one function makes a name, one finds the run that is meant by one."""

import difflib
import re
from collections.abc import Callable, Mapping

from millrace.errors import InvalidSpecError, NotFoundError, Violation

MAX_NAME = 63
"""Most characters of a name: it becomes part of object keys, of labels and of host names."""
RULE = f"lower-case letters, digits and '-', begins with a letter, at most {MAX_NAME}, no '-' at its end"
_LEGAL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


def is_legal(name: str) -> bool:
    """Whether a new run may have this name."""
    return _LEGAL.fullmatch(name) is not None


def suggest(text: str) -> str:
    """A legal name made of the text, `forkA` → `fork-a`; empty if it has no letter."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", text).lower()
    words = re.sub(r"[^a-z0-9]+", "-", words).lstrip("-0123456789")
    return words[:MAX_NAME].rstrip("-")


def make(stem: str, tail: str = "", *, is_taken: Callable[[str], bool] = lambda name: False) -> str:
    """A legal name, `{stem}-{tail}` with the stem cut where it is too long; where that is taken, with `-2`, `-3`, …."""
    words = stem if is_legal(stem) else re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-") or "run"
    words = words if words[0].isalpha() else f"run-{words}"
    number = 1
    while is_taken(name := _joined(words, tail, str(number) if number > 1 else "")):
        number += 1
    return name


def resolve(
    text: str,
    runs: Mapping[str, str],
    *,
    is_exact: bool = False,
    holder: str = "there is",
    remedy: str = "see what there is with `millrace run list`",
) -> str:
    """The name of the run that is meant, of `runs` (uid by name).

    Runs are named by their name, `runs/{name}` or uid and, unless `is_exact`, by the unique beginning of a name or by
    `-`, the newest run. NotFoundError ("{holder} no run …") with a did-you-mean or the `remedy`, InvalidSpecError if
    several names begin like this.
    """
    wanted = text.removeprefix("runs/")
    if wanted == "-" and not is_exact:
        if not runs:
            raise NotFoundError(
                f"{holder} no run yet",
                reason="RUN_NOT_FOUND",
                remedy="submit one: millrace run submit @ examples/reverse_text/rl.toml",
            )
        return max(runs, key=runs.__getitem__)  # uids sort by creation
    if wanted in runs:
        return wanted
    if (named := next((name for name, uid in runs.items() if uid == wanted), None)) is not None:
        return named
    near = sorted(name for name in runs if wanted and name.startswith(wanted))
    if near and not is_exact:
        if len(near) == 1:
            return near[0]
        message = f"{wanted!r} begins the names of {len(near)} runs: {', '.join(near[:8])}"
        raise InvalidSpecError([Violation(field="run", message=message)], remedy="type more of it")
    close = difflib.get_close_matches(wanted, runs, n=3)
    raise NotFoundError(
        f"run {wanted!r} does not exist" if is_exact else f"{holder} no run {wanted!r}",
        reason="RUN_NOT_FOUND",
        remedy=f"did you mean {' or '.join(close)}?" if close else remedy,
        metadata={"run": wanted},
    )


def _joined(stem: str, *tails: str) -> str:
    tail = "".join(f"-{each}" for each in tails if each)
    return f"{stem[: MAX_NAME - len(tail)].rstrip('-')}{tail}"
