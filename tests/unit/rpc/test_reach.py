"""What a server tells the registry about where it is."""

import socket

import pytest

from millrace.inference.settings import http_address
from millrace.rpc.reach import advertised, bound_socket, is_wildcard, listening_host, own_host
from millrace.telemetry.settings import Settings, join_address


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


def test_hosts_of_ipv6_have_their_brackets() -> None:
    assert join_address("fd00::1", 8000) == join_address("[fd00::1]", 8000) == "[fd00::1]:8000"
    assert join_address("engine-7", 8000) == "engine-7:8000"
    assert (
        http_address("[fd00::1]", 8000)("engine-7") == http_address("fd00::1", 8000)("x") == "http://[fd00::1]:8000/v1"
    )
    assert http_address("0.0.0.0", 8000)("[fd00::1]") == "http://[fd00::1]:8000/v1"
    assert advertised(Settings(listen="[fd00::1]:0"), 4711) == "[fd00::1]:4711"


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_a_wildcard_is_every_interface_of_both_families(host: str) -> None:
    with bound_socket(host, 0) as listener:
        listener.listen()
        for own in ("127.0.0.1", own_host(host), *(["::1"] if listener.family == socket.AF_INET6 else [])):
            socket.create_connection((own, listener.getsockname()[1]), timeout=5).close()
    assert listening_host(host) == ("::" if listener.family == socket.AF_INET6 else "0.0.0.0")


def test_one_host_is_that_alone() -> None:
    with bound_socket("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            bound_socket("127.0.0.1", _listening(listener))


def _listening(listener: socket.socket) -> int:
    listener.listen()
    return listener.getsockname()[1]
