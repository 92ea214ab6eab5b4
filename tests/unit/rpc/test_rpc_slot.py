"""A place that one process at a time can have; none where the port is whatever was free."""

import socket

import pytest

from millrace.rpc.reach import worker_slot


@pytest.mark.parametrize(("place", "has_slot"), [("127.0.0.1:50052", True), ("", False), ("127.0.0.1:0", False)])
def test_slots(place: str, has_slot: bool) -> None:
    assert worker_slot(place) == (f"{socket.gethostname()}/{place}" if has_slot else "")
