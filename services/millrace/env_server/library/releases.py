"""Which releases of `verifiers` a worker hosts, by generation of the environment.

An environment with an interpreter of its own brings its own release; ours is one of several. An environment that is not
hosted is refused at load with a message; its imports would fail with a bare name.
"""

import functools
import re
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version

from millrace.errors import InvalidSpecError, Violation

V0 = ((0, 1, 14), (0, 4))
"""Releases with the v0 API as the adapter uses it: from this one, before that one."""
V1 = ((0, 3, 1), (0, 5))
"""The same for v1; what 0.1.14 calls `verifiers.v1` is another thing."""
_TEXT = {"v0": (V0, "0.1.14 to 0.3.1"), "v1": (V1, "0.3.1 and 0.4")}
_OTHER = {
    "v0": "0.4 has no v0 API, and that of older ones is another one",
    "v1": "older ones have another v1 API, or none",
}

HOSTED = " and ".join(f"{generation} with {text}" for generation, (_, text) in _TEXT.items())
"""The hosted releases as a text for messages."""
TRIED = ("0.4.0", "0.3.1", "0.1.14")
"""Releases that were tried, the newest first (`docs/versions.md`)."""
FIELD, _REASON = "orchestrator.env.id", "ENV_RELEASE_UNSUPPORTED"
_REMEDY = (
    "install a release that fits beside it, or give it a virtual environment of its own (`orchestrator.env.python`)"
)


@functools.cache
def installed() -> str:
    """Return the release of `verifiers` that this process has; "" if it has none. Cached."""
    try:
        return version("verifiers")
    except PackageNotFoundError:
        return ""


def numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a release: (0, 1, 9) for `0.1.9.post3`; () if it begins with none."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def problem_of(generation: str, release: str) -> str:
    """Return why an environment of that generation ("v0" or "v1") cannot be played with `release` of the library;
    "" if it can.
    """
    (first, end), supported = _TEXT[generation]
    if first <= numbers(release) < end:
        return ""
    return (
        f"is a {generation} environment, and verifiers {release or '(none)'} is installed with it; {generation} "
        f"environments are played with verifiers {supported} ({_OTHER[generation]})"
    )


def unfit(env_id: str, error: BaseException) -> InvalidSpecError:
    """Make the InvalidSpecError for an environment whose import failed with `error`, because its code is for other
    releases.

    The message names the installed release of `verifiers`, and the one that the environment's package requires.
    """
    release, asks = installed(), _asked_by_its_package(env_id)
    message = (
        f"cannot be imported with verifiers {release or '(none)'}, which is installed with it: {error}. "
        f"{asks}Millrace plays {HOSTED}; {_REMEDY}"
    )
    return InvalidSpecError([Violation(field=FIELD, value=env_id, message=message)], reason=_REASON)


def require(generation: str, env_id: str) -> None:
    """Raise InvalidSpecError unless this process's release of `verifiers` has the generation ("v0" or "v1").

    `env_id` is for the message.
    """
    if problem := problem_of(generation, installed()):
        message = f"{problem}. {_asked_by_its_package(env_id)}To play it, {_REMEDY}"
        wrong = Violation(field=FIELD, value=env_id, message=message)
        raise InvalidSpecError([wrong], reason=_REASON)


def _asked_by_its_package(env_id: str) -> str:
    """Return a sentence with the release that the environment's package requires; "" if it requires none."""
    module = env_id.rpartition("/")[2].replace("-", "_").partition(".")[0]
    for package in packages_distributions().get(module, ()):
        for requirement in requires(package) or ():
            # Not another package whose name begins so.
            if re.match(r"verifiers(?![\w-])", requirement):
                return f"Its package {package} asks for {requirement.partition(';')[0].strip()}. "
    return ""
