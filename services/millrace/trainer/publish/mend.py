"""A policy that replicas found damaged is published anew by the trainer that still has its weights.

    replica: UPDATE_FAILED, is_damaged ──▶ orchestrator ──heartbeat──▶ trainer, between two steps or while it waits for
    a batch: is it damaged? ──▶ in full, under fresh names, `manifest.r1.json` ──▶ replicas, at their next attempt

The newest version is what replicas are asked for; the trainer of the next batch has its weights.
"""

import logging
from collections.abc import Callable

from millrace.decoding import decode_message
from millrace.internal.v1.policy_pb2 import PolicyEntry
from millrace.v1 import event_pb2

logger = logging.getLogger(__name__)

DamageReport = tuple[PolicyEntry, int]
"""A policy that replicas could not read, and how often they said so."""


class Mender:
    """Follows the reports of damage at rank 0; every rank publishes, by `mend`."""

    def __init__(
        self,
        mend: Callable[[PolicyEntry], None],
        reported: Callable[[], DamageReport | None],
        raise_failure: Callable[[], None],
    ) -> None:
        self._mend = mend
        self._reported = reported
        self._raise_failure = raise_failure
        self._num_heard = 0

    def wanted(self, version: int) -> bytes | None:
        """The policy to publish anew, for `mend`, if it is of this version, whose weights are live; once a report.

        Raises what publishing raised: the batch that is awaited may never come without the policy.
        """
        self._raise_failure()
        report = self._reported()
        if report is None or report[1] == self._num_heard or report[0].version != version:
            return None
        self._num_heard = report[1]
        return report[0].SerializeToString()

    def mend(self, policy: bytes) -> None:
        """Begin to publish a version anew, beside the training. Collective in a gang."""
        entry = decode_message(PolicyEntry, policy, what="a report of damage", reason="GANG_MESSAGE_INVALID")
        self._mend(entry)


def published_anew(name: str, *, damage: str, uri: str) -> event_pb2.Event:
    """What is told of a version, such as `0-7`, that is published anew at `uri`."""
    message = f"policy {name} was damaged ({damage}) and is published anew, in full, as {uri}"
    logger.warning(message)
    return event_pb2.Event(warning=event_pb2.Warning(reason="POLICY_PUBLISHED_ANEW", message=message))
