"""Ports: free ones, and a clear error for a taken one."""

import socket

import pytest

from millrace.errors import UnavailableError
from millrace.local.ports import free_ports, is_free, require_free


def test_free_ports_are_distinct_and_free():
    ports = free_ports(6)
    assert len(set(ports)) == 6 and all(20000 <= port < 32000 and is_free("127.0.0.1", port) for port in ports)


def test_taken_port_is_told_with_purpose_and_option():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        with pytest.raises(UnavailableError) as caught:
            require_free("127.0.0.1", port, purpose="the engine", option="--http-port")
    assert caught.value.exit_code == 5 and caught.value.reason == "PORT_IN_USE"
    assert caught.value.message == f"port {port} on 127.0.0.1 is in use; it is needed for the engine"
    assert "--http-port" in (caught.value.remedy or "")
    require_free("127.0.0.1", port, purpose="the engine", option="--http-port")


def test_no_port_left(monkeypatch):
    monkeypatch.setattr("millrace.local.ports.is_free", lambda *_: False)
    with pytest.raises(UnavailableError, match="found no 2 free ports"):
        free_ports(2)
