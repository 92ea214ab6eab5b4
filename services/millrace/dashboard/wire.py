"""What the orchestrator and its reader say to each other: frames of a length and so many bytes."""

import struct

LENGTH = struct.Struct("<IQ")
"""Bytes that follow, and the number of the question."""
MAX_QUESTION_BYTES = 1 << 20
MAX_ANSWER_BYTES = 256 << 20


def frame(number: int, data: bytes) -> bytes:
    """A frame with these bytes."""
    return LENGTH.pack(len(data), number) + data
