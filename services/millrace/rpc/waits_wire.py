"""Waits on the wire; `millrace.telemetry.waits` itself knows no protobuf."""

from collections.abc import Iterable

from millrace.telemetry.waits import Wait
from millrace.v1 import event_pb2


def to_proto(waits: Iterable[Wait]) -> list[event_pb2.Wait]:
    """The waits as messages, in the same order."""
    return [
        event_pb2.Wait(
            owner=wait.owner,
            reason=wait.reason,
            waits_on=wait.waits_on,
            age_seconds=wait.age_s,
            deadline_seconds=wait.deadline_s,
            run_uid=wait.run,
        )
        for wait in waits
    ]


def from_proto(messages: Iterable[event_pb2.Wait]) -> list[Wait]:
    """The waits that another process reports, in the same order."""
    return [
        Wait(
            owner=message.owner,
            reason=message.reason,
            waits_on=message.waits_on,
            age_s=message.age_seconds,
            deadline_s=message.deadline_seconds,
            run=message.run_uid,
        )
        for message in messages
    ]
