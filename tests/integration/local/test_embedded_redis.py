"""The embedded Redis: starts, keeps its data, and dies with its parent."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from millrace.errors import UnavailableError
from millrace.local.redis import EmbeddedRedis
from millrace.runlog.redis.entry import MAX_ENTRY_BYTES


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


def test_a_value_that_nobody_would_decode_cannot_be_written(tmp_path):
    with EmbeddedRedis(tmp_path / "data") as server:
        client = redis.Redis.from_url(server.url)
        assert client.config_get("proto-max-bulk-len") == {"proto-max-bulk-len": str(MAX_ENTRY_BYTES)}
        password = server.url.removeprefix("redis://:").partition("@")[0]
        for size, is_taken in ((MAX_ENTRY_BYTES, True), (MAX_ENTRY_BYTES + 1, False)):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as link:
                link.sendall(f"AUTH {password}\r\n*3\r\n$3\r\nSET\r\n$1\r\na\r\n${size}\r\n".encode())
                link.settimeout(1.0)
                said = b""
                while b"Protocol error" not in said:
                    try:
                        said += link.recv(4096)
                    except TimeoutError:  # it waits for the value
                        break
            assert (b"invalid bulk length" not in said) is is_taken, said


def test_a_local_process_without_the_password_gets_nothing(tmp_path):
    with EmbeddedRedis(tmp_path / 'a "strange" directory') as server:
        redis.Redis.from_url(server.url).set("a", "b")
        for password in (None, "guessed"):
            stranger = redis.Redis(port=server.port, password=password, retry=Retry(NoBackoff(), 0))
            for attempt in (
                lambda client: client.get("a"),
                lambda client: client.set("a", "c"),
                lambda client: client.xadd("s", {"a": "b"}),
                lambda client: client.flushall(),
                lambda client: client.config_get("requirepass"),
                lambda client: client.acl_whoami(),
            ):
                with pytest.raises(redis.AuthenticationError):
                    attempt(stranger)
        assert redis.Redis.from_url(server.url_file.read_text().strip()).get("a") == b"b"
        with EmbeddedRedis(tmp_path / "other") as other:
            assert other.url.partition("@")[0] != server.url.partition("@")[0], "each has its own"


def test_the_password_stands_in_files_of_its_owner_alone(tmp_path):
    before = os.umask(0)  # the most careless user there is
    try:
        with EmbeddedRedis(tmp_path / "data") as server:
            secret = server.url.removeprefix("redis://:").partition("@")[0]
            assert len(secret) >= 32
            at = Path(f"/proc/{server.pid}")
            assert secret.encode() not in (at / "cmdline").read_bytes() + (at / "environ").read_bytes()
            assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
            bearing = [path for path in server.directory.rglob("*") if path.is_file() and secret in _text(path)]
            assert sorted(path.name for path in bearing) == ["redis.conf", "redis.url"]
            assert {stat.S_IMODE(path.stat().st_mode) for path in bearing} == {0o600}
    finally:
        os.umask(before)


def _text(path: Path) -> str:
    return path.read_text(errors="replace")


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
    parent.wait(60)
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
