"""Names for runs that are to be made."""

from pathlib import Path

from millrace.errors import InvalidSpecError, Violation
from millrace.runlog import run_name


def check_new_name(text: str, *, option: str = "--name") -> str:
    """The name; InvalidSpecError that suggests a legal one which looks like it."""
    if run_name.is_legal(text):
        return text
    close = run_name.suggest(text)
    source = "command line" if option.startswith("--") else None
    violation = Violation(field=option, value=repr(text), message=run_name.RULE, source=source)
    raise InvalidSpecError([violation], remedy=f"for example {option} {close}" if close else "choose such a name")


def free_name(stem: str, tail: str = "", *, root: Path) -> str:
    """A name of which no results lie under `root`: `{stem}-{tail}`, else with `-2`, `-3`, … behind it."""

    def is_taken(name: str) -> bool:
        return (root / name).exists() and any((root / name).iterdir())

    return run_name.make(stem, tail, is_taken=is_taken)
