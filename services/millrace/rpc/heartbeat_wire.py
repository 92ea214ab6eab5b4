"""What heartbeats carry, waits and the use of GPUs, on the wire; `millrace.telemetry` itself knows no protobuf."""

import math
from collections.abc import Iterable, Sequence

from millrace.internal.v1 import worker_service_pb2
from millrace.telemetry.gpus import MAX_GPUS, GpuUse
from millrace.telemetry.waits import Wait
from millrace.v1 import event_pb2

_NAME_CHARS = 100


def to_proto(waits: Iterable[Wait]) -> list[event_pb2.Wait]:
    """Return the waits as messages, in the same order."""
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
    """Return the waits that another process reports, in the same order."""
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


def gpu_to_proto(gpu: GpuUse) -> worker_service_pb2.GpuUse:
    """Return a GPU as a message."""
    return worker_service_pb2.GpuUse(
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        memory_used_bytes=gpu.memory_used,
        memory_total_bytes=gpu.memory_total,
        utilization=gpu.utilization,
        power_watts=gpu.power_watts,
    )


def gpus_from_proto(messages: Sequence[worker_service_pb2.GpuUse]) -> list[GpuUse]:
    """The GPUs that a worker reports, `MAX_GPUS` at most; a number that cannot be is as one that is not there."""
    return [
        GpuUse(
            index=each.index,
            uuid=each.uuid[:_NAME_CHARS],
            name=each.name[:_NAME_CHARS],
            memory_used=each.memory_used_bytes if each.HasField("memory_used_bytes") else None,
            memory_total=each.memory_total_bytes if each.HasField("memory_total_bytes") else None,
            utilization=_within(each.utilization, 1.0) if each.HasField("utilization") else None,
            power_watts=_within(each.power_watts, 1e6) if each.HasField("power_watts") else None,
        )
        for each in messages[:MAX_GPUS]
    ]


def _within(value: float, most: float) -> float | None:
    return value if math.isfinite(value) and 0 <= value <= most else None
