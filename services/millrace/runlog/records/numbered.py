"""Objects of a run that are numbered from 1 without a gap: epochs, intents, attestations."""

from collections.abc import Callable

from millrace.errors import UnavailableError
from millrace.runlog.names import Names
from millrace.storage import ObjectStore

_MAX_ATTEMPTS = 100  # as many rivals would have to win in between; something else is wrong then


def create_next(
    store: ObjectStore,
    names: Names,
    data_of: Callable[[int], bytes],
    *,
    key_of: Callable[[int], str],
    last: int,
    what: str,
    reason: str,
) -> int:
    """Create the object behind number `last` under the first number that is free, and return it (blocking).

    Exactly one caller ever gets each number, from which `data_of` makes what is stored. `what` and `reason` are for the
    error.
    """
    for number in range(last + 1, last + 1 + _MAX_ATTEMPTS):
        if store.create(key_of(number), data_of(number)):
            return number
    raise UnavailableError(
        f"lost {_MAX_ATTEMPTS} races for {what} of run {names.uid}",
        reason=reason,
        remedy="find out which processes keep writing them",
        metadata={"uid": names.uid},
    )
