"""Names for runs that are to be made."""

import re

from millrace.errors import InvalidSpecError, Violation

MAX_NAME = 63
_LEGAL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


def check_new_name(text: str, *, option: str = "--name") -> str:
    """The name; InvalidSpecError that suggests a legal one which looks like it."""
    if _LEGAL.fullmatch(text):
        return text
    close = suggestion(text)
    violation = Violation(
        field=option,
        value=repr(text),
        message=f"lower-case letters, digits and '-', begins with a letter, at most {MAX_NAME}, no '-' at its end",
        source="command line" if option.startswith("--") else None,
    )
    raise InvalidSpecError([violation], remedy=f"for example {option} {close}" if close else "choose such a name")


def suggestion(text: str) -> str:
    """A legal name made of the text, `forkA` → `fork-a`; empty if it has no letter."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", text).lower()
    words = re.sub(r"[^a-z0-9]+", "-", words).lstrip("-0123456789")
    return words[:MAX_NAME].rstrip("-")
