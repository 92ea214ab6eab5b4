"""The event writer never loses an event in silence, whatever ends it."""

from typing import Any, cast

import pytest

from millrace.errors import InternalError
from millrace.runlog import EventWriter, RunLog
from millrace.v1 import event_pb2


class BrokenLog:
    """A log with a defect."""

    uid = "run-a"

    async def read_instance(self) -> str:
        return "1.a"

    async def writer_sequence(self, writer: str) -> int:
        raise KeyError("a defect")


async def test_an_unexpected_error_is_raised_by_every_later_call(caplog: pytest.LogCaptureFixture) -> None:
    event = event_pb2.Event(warning=event_pb2.Warning(reason="TEST", message="x"))
    writer = EventWriter(cast("RunLog", BrokenLog()), "trainer-1")
    await writer.write(event)
    calls: list[Any] = [
        lambda: writer.flush(timeout_s=5),
        lambda: writer.write(event),
        lambda: writer.close(timeout_s=5),
    ]
    for call in calls:
        with pytest.raises(InternalError, match=r"events of trainer-1 to run run-a.*KeyError") as raised:
            await call()
        assert raised.value.reason == "EVENT_WRITER_FAILED" and isinstance(raised.value.__cause__, KeyError)
    assert [record.exc_info is not None for record in caplog.records if "event writer ended" in record.message] == [
        True
    ]
