"""What a server tells the registry about where it is."""

import socket

import pytest

from millrace.rpc.reach import advertised
from millrace.telemetry.settings import Settings


@pytest.mark.parametrize("listen", ["0.0.0.0:50052", "[::]:50052"])
def test_a_wildcard_is_told_as_the_name_of_the_machine(listen: str) -> None:
    assert advertised(Settings(listen=listen), 50052) == f"{socket.gethostname()}:50052"


def test_a_host_is_told_as_it_is_with_the_port_that_was_taken() -> None:
    assert advertised(Settings(listen="127.0.0.1:0"), 4711) == "127.0.0.1:4711"


def test_an_explicit_address_wins() -> None:
    assert advertised(Settings(listen="0.0.0.0:1", advertise="engine-7:50053"), 1) == "engine-7:50053"
