"""Checks that installed packages have releases that Millrace was tried with (`docs/versions.md`).

What was tried is what the extras of Millrace's own package take, so it is asked of the package. pip installs nothing
else beside it, but later installations may: the services then fail in a chain of imports, or compute something else.
"""

import logging
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version

from millrace.errors import InvalidSpecError, InvalidStateError, Violation

UNTRIED_VARIABLE = "MILLRACE_UNTRIED"
"""1 runs services with releases that Millrace was not tried with, with a warning; 0, the default, refuses them."""
logger = logging.getLogger(__name__)


def require_tried(extra: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise InvalidStateError (VERSION_NOT_TRIED) if an installed package has a release that Millrace was not tried
    with.

    `extra` names the extra of Millrace's package whose requirements are checked. With `UNTRIED_VARIABLE` in `environ`
    it is a logged warning. Packages that are not installed are not checked. Call it before they are imported.
    """
    untried = untried_packages(extra)
    if not untried:
        return
    message = "; ".join(
        f"{name} {found or 'of an unknown release'} is installed, and Millrace was tried with {name}{tried}"
        for name, (found, tried) in untried.items()
    )
    if may_be_untried(environ):
        logger.warning(message)
        return
    wanted = " ".join(f"'{name}{tried}'" for name, (_, tried) in untried.items())
    raise InvalidStateError(
        message,
        reason="VERSION_NOT_TRIED",
        remedy=f"run `python -m pip install {wanted}`, or set {UNTRIED_VARIABLE}=1 to start it all the same: parts may "
        "fail, or compute something else",
        metadata={name: found for name, (found, _) in untried.items()},
    )


def may_be_untried(environ: Mapping[str, str]) -> bool:
    """Return whether `UNTRIED_VARIABLE` in `environ` is 1, which allows untried releases.

    Raise InvalidSpecError for a value but 0, 1 and none.
    """
    text = environ.get(UNTRIED_VARIABLE, "")
    if text not in ("", "0", "1"):
        wrong = Violation(field=UNTRIED_VARIABLE, value=text, message="must be 1 or 0", source="environment")
        raise InvalidSpecError([wrong], reason="SETTINGS_INVALID", remedy="set it to 1 or 0, or unset it")
    return text == "1"


def untried_packages(extra: str) -> dict[str, tuple[str, str]]:
    """Return the packages of an extra of Millrace whose installed release was not tried, by name.

    Each with the installed release and the specifier of those that were tried, such as `>=2.6,<2.9`. Empty if Millrace
    itself is not installed.
    """
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion

    try:
        requirements = [Requirement(text) for text in requires("millrace") or ()]
    except PackageNotFoundError:  # from a checkout that was never installed: nothing says what it takes
        return {}
    untried: dict[str, tuple[str, str]] = {}
    for each in requirements:
        if each.name == "millrace" or each.marker is None or not each.marker.evaluate({"extra": extra}):
            continue
        try:
            found = version(each.name) or ""
        except PackageNotFoundError:
            continue
        try:
            is_tried = each.specifier.contains(found, prereleases=True)
        except InvalidVersion:
            is_tried = False
        if not is_tried:
            untried[each.name] = (found, str(each.specifier))
    return untried
