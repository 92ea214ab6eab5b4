"""What a server tells the registry about where it is."""

import socket

import pytest

from millrace.inference.registration import http_address
from millrace.rpc.reach import advertised, is_wildcard
from millrace.telemetry.settings import Settings


@pytest.mark.parametrize("listen", ["0.0.0.0:50052", "[::]:50052"])
def test_a_wildcard_is_told_as_the_name_of_the_machine(listen: str) -> None:
    assert advertised(Settings(listen=listen), 50052) == f"{socket.gethostname()}:50052"


def test_a_host_is_told_as_it_is_with_the_port_that_was_taken() -> None:
    assert advertised(Settings(listen="127.0.0.1:0"), 4711) == "127.0.0.1:4711"


def test_an_explicit_address_wins() -> None:
    assert advertised(Settings(listen="0.0.0.0:1", advertise="engine-7:50053"), 1) == "engine-7:50053"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "[::]"])
def test_the_url_of_an_engine_that_listens_everywhere_is_of_the_reachable_host(host: str) -> None:
    assert is_wildcard(host) and http_address(host, 8000)("engine-7") == "http://engine-7:8000/v1"


def test_the_url_of_an_engine_on_one_host_is_of_that_host() -> None:
    assert http_address("10.0.0.7", 8000)("engine-7") == "http://10.0.0.7:8000/v1"
