"""Which failures of a model call mean that the engine went away, and how often a call is tried before that is said.

A lost engine (connection refused or broken off; a replica that starts, drains, or is being updated for longer than a
moment; one that refuses our token while tokens are being changed) says nothing about the task: its rollout ends as
ENGINE_LOST and the orchestrator plays it again, whole, where an engine answers. Everything else that an engine answers
(400, 500) is the engine's word about this request.
"""

from millrace.backoff import Backoff

EXTERNAL_RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504, *range(520, 525)})
"""An endpoint that is not ours has no other replica that we know of: what may pass by itself is tried again there. A
content network says 520 to 524 of a server behind it that does not answer."""
EXTERNAL_MAX_ATTEMPTS = 6
"""Tries of one model call of an external endpoint, within a minute and a half."""
MAX_RETRY_AFTER_S = 30.0
"""Longest pause that an endpoint's `Retry-After` is given."""
RETRIED_STATUSES = frozenset({429, 503})
"""The engine refused before it did any work: it is starting, updating its policy, or full."""
LOST_STATUSES = frozenset({429, 502, 503, 504})
"""After the last try: nobody serves this request here."""
REFUSED_STATUSES = frozenset({401, 403})
"""Of an engine of ours: it or we do not have the new token yet. An endpoint that is not ours means what it says."""
MAX_ATTEMPTS = 4
"""Tries of one model call, within two seconds: longer outages are the orchestrator's, which knows other replicas."""
ENGINE_LOST_MARK = "engine lost:"
"""Begins the message of such an error, through layers that keep only its text."""
_BACKOFF = Backoff(0.25, 5.0, spread=(0.5, 1.0))
_EXTERNAL_BACKOFF = Backoff(1.0, MAX_RETRY_AFTER_S, spread=(1.0, 1.25))


def external_pause_s(attempt: int, retry_after: str | None) -> float:
    """Seconds before the try that follows the `attempt`-th, from 1: what the endpoint asks for, else 1, 2, 4, ..."""
    try:
        asked_s = 0.0 if retry_after is None else float(retry_after)
    except ValueError:  # a date: rare, and our own pauses do
        asked_s = 0.0
    is_asked = 0 < asked_s < float("inf")
    return _EXTERNAL_BACKOFF.limited(asked_s) if is_asked else _EXTERNAL_BACKOFF.after(attempt)


def retry_pause_s(attempt: int) -> float:
    """Seconds before the try that follows the `attempt`-th, from 1; spread over a group."""
    return _BACKOFF.after(attempt)
