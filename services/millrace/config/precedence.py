"""Shared keys and their sources: a stronger source that sets one spelling of a value overrules the weaker spellings.

Command line > files > environment. All files are equally strong: in the split form each holds one service, and a
contradiction between two of them is the user's to solve. What this leaves contradicting itself is reported later.
"""

from millrace.config.paths import Path
from millrace.config.sharing import SEQ_LEN, SHARED_KEYS
from millrace.config.sources import Merged, Strength


def drop_overruled(merged: Merged) -> None:
    """Take out what a stronger source overrules, in place.

    A shared key at the top overrules the services' keys of weaker sources. It is overruled itself only where every
    service's key is written in a stronger source: one of several services' keys alone does not speak for the others.
    """
    for shared in (*SHARED_KEYS, SEQ_LEN):
        _drop(merged, shared.top, shared.targets)


def _drop(merged: Merged, top: Path, targets: tuple[Path, ...]) -> None:
    exists, value = merged.value(top)
    if not exists:
        return
    written = {path: found for path in targets if (found := merged.value(path))[0]}
    values = [value, *(found for _, found in written.values())]
    if any(isinstance(item, dict) for item in values) and all(isinstance(item, dict) for item in values):
        for key in list(value):  # tables are united, so each of their keys is a shared key of its own
            _drop(merged, (*top, key), tuple((*path, key) for path in targets))
        return
    strength = _strength(merged, top)
    if len(written) == len(targets) and all(_strength(merged, path) > strength for path in written):
        merged.drop(top)
        return
    for path in written:
        if _strength(merged, path) < strength:
            merged.drop(path)


def _strength(merged: Merged, path: Path) -> Strength:
    """The strength of the source that wrote a value; of a table, that of its strongest key."""
    inside = [origin.strength for known, origin in merged.origins.items() if known[: len(path)] == path]
    origin = merged.origin_of(path)
    return max(inside, default=origin.strength if origin else Strength.ENVIRONMENT)
