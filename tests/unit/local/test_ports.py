"""Ports: free ones, and a clear error for a taken one."""

import fcntl
import os
import socket
import subprocess
import sys
import time

import pytest

from millrace.errors import UnavailableError
from millrace.local.directory import free_ports, is_free, require_free
from millrace.local.stack import READY_DEADLINE_S


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


def test_what_was_given_out_to_one_process_is_not_given_to_another_soon(tmp_path):
    script = "from millrace.local.directory import free_port; print(*(free_port() for _ in range(300)))"
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    given = [process.communicate(timeout=60)[0].split() for process in started]
    assert all(process.returncode == 0 for process in started)
    assert len({*given[0], *given[1]}) == 600


def test_a_port_is_held_for_as_long_as_a_first_start_may_take(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("millrace.local.directory._RANGE", (20000, 20040))
    monkeypatch.setattr("millrace.local.directory._TRIES", 10_000)
    monkeypatch.setattr("millrace.local.directory.is_free", lambda *_: True)
    given = set(free_ports(20))
    began = time.time()
    monkeypatch.setattr(time, "time", lambda: began + READY_DEADLINE_S - 1)
    assert not given & set(free_ports(20))


def test_ports_are_given_out_where_nothing_can_be_written(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    assert len(free_ports(3)) == 3


def test_a_process_that_stands_still_keeps_no_stack_from_starting(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("millrace.local.directory._LOCK_S", 0.1)
    with (tmp_path / f"millrace-ports-{os.getuid()}").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert len(free_ports(3)) == 3


def test_no_port_left(monkeypatch):
    monkeypatch.setattr("millrace.local.directory.is_free", lambda *_: False)
    with pytest.raises(UnavailableError, match="found no 2 free ports"):
        free_ports(2)


def test_a_port_that_is_promised_to_somebody_is_not_given_out(monkeypatch):
    tried = iter([20001, 20002, 20003, 20004])
    monkeypatch.setattr("random.randrange", lambda *_: next(tried))
    monkeypatch.setattr("millrace.local.directory.is_free", lambda *_: True)
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    assert free_ports(2, but={20001, 20003}) == [20002, 20004]
