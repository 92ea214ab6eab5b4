"""What the exporter of a run says to the orchestrator: JSON lines."""

from typing import Any

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError


def decode_report(line: bytes) -> dict[str, Any] | None:
    """The report of a line; None for what a foreign library has written in between."""
    try:
        return decode_object(line, what="a report of the exporter", reason="REPORT_UNREADABLE")
    except CorruptObjectError:
        return None
