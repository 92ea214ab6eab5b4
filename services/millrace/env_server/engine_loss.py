"""Which failures of a model call mean that the engine went away, and how often a call is tried before that is said.

A lost engine (connection refused or broken off; a replica that starts, drains, or is being updated for longer than a
moment) says nothing about the task: its rollout ends as ENGINE_LOST and the orchestrator plays it again, whole, where
an engine answers. Everything else that an engine answers (400, 500) is the engine's word about this request.
"""

import random

RETRIED_STATUSES = frozenset({429, 503})
"""The engine refused before it did any work: it is starting, updating its policy, or full."""
LOST_STATUSES = frozenset({429, 502, 503, 504})
"""After the last try: nobody serves this request here."""
MAX_ATTEMPTS = 4
"""Tries of one model call, within two seconds: longer outages are the orchestrator's, which knows other replicas."""
ENGINE_LOST_MARK = "engine lost:"
"""Begins the message of such an error, through layers that keep only its text."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.25, 5.0


def retry_pause_s(attempt: int) -> float:
    """Seconds before the try that follows the `attempt`-th, from 1; spread over a group."""
    return min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _MAX_PAUSE_S) * random.uniform(0.5, 1.0)
