"""The embedded Redis: starts, keeps its data, and dies with its parent."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from millrace.errors import UnavailableError
from millrace.local.redis import EmbeddedRedis


def test_it_starts_answers_and_stops(tmp_path):
    server = EmbeddedRedis(tmp_path / "data")
    server.start()
    pid = server.pid
    assert pid is not None
    client = redis.Redis.from_url(server.url)
    client.set("a", "b")
    assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    client.close()
    server.stop()
    server.stop()
    assert server.pid is None and not Path(f"/proc/{pid}").exists()
    with EmbeddedRedis(tmp_path / "data", port=server.port) as again:
        assert redis.Redis.from_url(again.url).get("a") == b"b", "the append-only file must hold it"


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=rf"127\.0\.0\.1:{port}.*(in use|another port)"):
            EmbeddedRedis(tmp_path, port=port).start(deadline_s=10)


def test_it_dies_with_its_parent(tmp_path):
    code = (
        "import sys, time, pathlib; from millrace.local.redis import EmbeddedRedis;"
        "r = EmbeddedRedis(pathlib.Path(sys.argv[1])); r.start(); print(r.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(5)
    parent.stdout.close()
    ends = time.monotonic() + 10
    while _is_running(pid):
        assert time.monotonic() < ends, "the server outlived its parent"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
