"""The container image that an env-server announces (`MILLRACE_ENV_IMAGE`), and whose environments it therefore plays.

An env-server cannot find out what image it runs: it is told at its start. The orchestrator places environments by it
(`orchestrator.env.image`); what is here refuses those that came to the wrong place.
"""

import re

from millrace.config.section import IMAGE_PATTERN
from millrace.errors import InvalidSpecError, Violation

IMAGE_VARIABLE = "MILLRACE_ENV_IMAGE"
FIELD = "orchestrator.env.image"


def parse_image(text: str) -> str:
    """The image of a value of the variable; ValueError if it cannot be one."""
    if not re.fullmatch(IMAGE_PATTERN, text):
        raise ValueError("must be the name of a container image, such as registry.example.com/team/my-env:1.2")
    return text


def require_image(wanted: str, announced: str) -> None:
    """InvalidSpecError unless an env-server that announces that image ("" if none) plays environments that want it."""
    if wanted == announced:
        return
    if not announced:
        message = (
            f"is not what this env-server runs: it announces no image; start one from {wanted} with "
            f"{IMAGE_VARIABLE}={wanted}, or leave the key out"
        )
    elif not wanted:
        message = (
            f"is not set, and this env-server plays only environments of {announced}: set it to that, or start an "
            f"env-server without {IMAGE_VARIABLE}"
        )
    else:
        message = f"is not what this env-server runs, which is {announced}; correct one of the two"
    raise InvalidSpecError([Violation(field=FIELD, value=wanted, message=message)], reason="ENV_IMAGE_REFUSED")
