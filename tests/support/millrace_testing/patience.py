"""Limits of promises on machines that others want as well: longer by as much as the processors are waited for."""

import os

MOST = 5.0
"""However busy the machine, beyond so many times the limit the promise counts as broken."""


def patient(seconds: float) -> float:
    """Return `seconds` on a machine of one's own; `seconds` times the load per processor, at most `MOST`, on a
    busy one.
    """
    return seconds * min(MOST, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
