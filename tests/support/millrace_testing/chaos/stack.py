"""The real stack, made to be broken: `millrace up` on a warmed-up tiny model, with faults to arm and processes to kill.

    def test_x(chaos: ChaosStack):                      # one stack for all tests of the session
        fault = chaos.arm(Point.TRAINER_AFTER_PUBLISH, when={"step": 3})
        run = chaos.submit(max_steps=6)
        record = fault.wait()                           # the trainer has killed itself there
        chaos.finish(run)                               # SUCCEEDED by itself, audit clean

Methods block; each wait has a deadline and its AssertionError says what the run did last and waits for. Times are those
of `time.time()`, because fault records and events carry it. For stores and Redis with faults of their own, make a
`ChaosStack` with `env=`.
"""

import contextlib
import fcntl
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import redis
import redis.asyncio

from millrace.client import Client, SyncClient
from millrace.config import RLConfig
from millrace.config.load import load
from millrace.errors import MillraceError, UnavailableError
from millrace.local.directory import free_ports
from millrace.local.redis import die_with_parent
from millrace.processes.supervisor import tail
from millrace.readers.audit import audit_run
from millrace.rpc.probe import probe
from millrace.storage import ObjectStore, open_store
from millrace.telemetry import faults
from millrace.telemetry.faults import Action, Fault, Point
from millrace_testing.chaos import loop as chaos_loop
from millrace_testing.chaos.run import STALLS_S, WAITS_S, ChaosRun
from millrace_testing.workplaces import STOP_TIMEOUT_S, Workplace

CONFIG = Path(__file__).with_name("chaos.toml")
START_TIMEOUT_S = 300.0
SERVICES = ("env-server", "inference", "orchestrator", "trainer")
PREFIX = "millrace"
_POLL_S = 0.05


@dataclass(frozen=True)
class Armed:
    """A fault that strikes when a process reaches its point."""

    fault: Fault
    fired: Path

    def has_fired(self) -> bool:
        """Return whether the fault has struck."""
        return self.fired.exists() and bool(self.fired.read_text())

    def wait(self, run: ChaosRun | None = None, *, timeout_s: float = WAITS_S) -> dict[str, Any]:
        """Wait until the fault has struck, and return its record (`pid`, `time`, `where`, `action`).

        `run` adds its state to the message of a failure.
        """
        ends = time.monotonic() + timeout_s
        while not self.has_fired():
            if time.monotonic() > ends or (run is not None and run.is_over):
                did = f" {run.name} did: {run.describe()}" if run else ""
                raise AssertionError(f"nobody reached {self.fault.point.value} under {self.fault.when}.{did}")
            time.sleep(_POLL_S)
        return json.loads(self.fired.read_text())


class ChaosStack:
    """`millrace up` for the length of a `with` block."""

    def __init__(
        self, workplace: Workplace, name: str, *, options: tuple[str, ...] = (), env: Mapping[str, str] | None = None
    ) -> None:
        """Take `name`, the stack's directory under outputs/; `options` go to `millrace up`, `env` to every process."""
        self.workplace = workplace
        self.directory = workplace.path / "outputs" / name
        self.faults = self.directory / "faults"
        self.address = ""
        self._options = options
        self._env = dict(env or {})
        self._process: subprocess.Popen[str] | None = None
        self._numbers = itertools.count(1)
        self._runs: list[ChaosRun] = []

    # Life of the stack.

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, or start it again in the same directory and at the same address."""
        if not self.address:
            port, self.http_port = free_ports(2)
            self.address = f"127.0.0.1:{port}"
        self.faults.mkdir(parents=True, exist_ok=True)
        place = ["--dir", str(self.directory), "--listen", self.address, "--http-port", str(self.http_port)]
        with (self.directory / "up.out").open("a") as output:
            self._process = self.workplace.popen(
                *("-m", "millrace.cli", "up", *place, *self._options),
                stdout=output,
                preexec_fn=die_with_parent,  # tests that are killed leave no stack after: its reaper ends the rest
                env={faults.VARIABLE: str(self.faults), **self._env},
            )
        ends = time.monotonic() + START_TIMEOUT_S
        while not self._place().get("pids") or self._place().get("pid") != self._process.pid:
            if self._process.poll() is not None or time.monotonic() > ends:
                raise AssertionError(f"the stack did not start:\n{self.said()}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Stop the stack by Ctrl-C and assert that nothing of it is left."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its reaper ends what it has started
            process.wait(STOP_TIMEOUT_S)
            raise AssertionError(f"the stack did not stop within {STOP_TIMEOUT_S} s:\n{self.said()}") from None

    def kill_all(self) -> None:
        """Send SIGKILL to the supervisor, whose reaper then ends all processes; `start` starts it again."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)
        self._process = None
        self.workplace.wait_empty(timeout_s=WAITS_S)

    def said(self, lines: int = 40) -> str:
        """Return the end of what `millrace up` printed."""
        return "\n".join(tail(self.directory / "up.out", lines))

    def log_of(self, name: str, lines: int = 15) -> str:
        """Return the end of a process's log."""
        return "\n".join(tail(self.directory / "logs" / f"{name}.log", lines))

    @property
    def where(self) -> dict[str, Any]:
        """Return the stack's `addresses`, `redis` and `store`."""
        return self._place()

    @property
    def is_up(self) -> bool:
        """Return whether it was started, and not stopped or killed by its test since."""
        return self._process is not None

    # Its processes.

    def pids(self) -> dict[str, int]:
        """Return the current process ids by name: redis and `SERVICES`."""
        return self._place()["pids"]

    def pid(self, name: str) -> int:
        """Return the current process id of a service."""
        return self.pids()[name]

    def restarts(self, name: str) -> int:
        """Return how often the supervisor has started it again."""
        return self._place()["restarts"][name]

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal to a process, and return the time (`time.time()`)."""
        at = time.time()
        os.kill(self.pid(name), number)
        return at

    def freeze(self, name: str) -> int:
        """Send SIGSTOP to a process, and return its id for `thaw`.

        The stack kills it after 30 s unless started with `--no-liveness`.
        """
        pid = self.pid(name)
        os.kill(pid, signal.SIGSTOP)
        return pid

    def thaw(self, pid: int) -> None:
        """Send SIGCONT; ignore a process that is gone meanwhile."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def kill_running(self, name: str, *, timeout_s: float = WAITS_S) -> float:
        """Send SIGKILL to a process, which may still be starting; return the time (`time.time()`)."""
        ends = time.monotonic() + timeout_s
        while True:
            try:
                return self.kill(name)
            except ProcessLookupError:  # it is dead at the moment: the supervisor waits before it starts it again
                if time.monotonic() > ends:
                    raise AssertionError(f"{name} was not started again:\n{self.said(8)}") from None
                time.sleep(_POLL_S)

    def notes(self) -> list[str]:
        """Return what the supervisor has noted: deaths, restarts, silence."""
        return (self.directory / "logs" / "stack.log").read_text().splitlines()

    def wait_replaced(self, name: str, old_pid: int, *, timeout_s: float = WAITS_S) -> float:
        """Wait until another process has the name, and return the time (`time.time()`). It may not serve yet."""
        ends = time.monotonic() + timeout_s
        while self.pid(name) == old_pid:
            if time.monotonic() > ends:
                raise AssertionError(f"{name} (pid {old_pid}) was not replaced in {timeout_s:g} s:\n{self.said(8)}")
            time.sleep(_POLL_S)
        return time.time()

    def wait_restarted(self, name: str, old_pid: int, *, timeout_s: float = WAITS_S) -> int:
        """Wait until the supervisor has restarted the process and it serves; return its process id."""
        ends = time.monotonic() + timeout_s
        while (pid := self.pid(name)) == old_pid or not self._serves(name):
            if time.monotonic() > ends:
                raise AssertionError(f"{name} is not back after {timeout_s:g} s:\n{self.said(8)}\n{self.log_of(name)}")
            time.sleep(_POLL_S)
        return pid

    def wait_ready(self, *, timeout_s: float = WAITS_S) -> None:
        """Wait until every process serves, so that a kill in one test does not disturb the next one."""
        ends = time.monotonic() + timeout_s
        while late := [name for name in self.pids() if not self._serves(name)]:
            if time.monotonic() > ends:
                raise AssertionError(f"{late} do not serve after {timeout_s:g} s:\n{self.said(8)}")
            time.sleep(_POLL_S)

    # Its faults.

    def arm(
        self, point: Point, action: Action = Action.KILL, *, when: Mapping[str, int] | None = None, **more: Any
    ) -> Armed:
        """Arm a fault: it strikes once, the next time a process reaches the point with the values in `when`."""
        fault = Fault(point=point, action=action, when=dict(when or {}), **more)
        (self.faults / f"{point.value}.fired").unlink(missing_ok=True)
        return Armed(fault, faults.arm(self.faults, fault))

    def disarm(self) -> None:
        """Remove all faults and records."""
        faults.disarm(self.faults)

    # Its runs.

    def submit(self, name: str | None = None, /, *options: str, **overrides: Any) -> ChaosRun:
        """Submit a short run and follow it. `max_steps=4` or `**{"ckpt.interval": 3}`; `options` are raw flags."""
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in overrides.items()]
        config = load(RLConfig, ["@", str(CONFIG), *flags, *options], {}).config
        config = config.with_model(str(self.workplace.path / config.model.name))
        run_id = name or f"chaos-{next(self._numbers)}"

        async def create() -> str:
            async with Client(self.address) as client:
                return (await client.runs.create(config.resolved_json(), run_id=run_id)).uid

        run = ChaosRun(address=self.address, name=f"runs/{run_id}", uid=chaos_loop.call(create()))
        self._runs.append(run)
        return run

    def fork(self, parent: ChaosRun, name: str, *options: str) -> ChaosRun:
        """Fork a run with the command `millrace run fork`, and follow the new run."""
        command = ("run", "fork", parent.name, "--name", name, "--server", self.address, *options)
        assert f"millrace run watch {name}" in self.workplace.millrace(*command)
        with SyncClient(self.address) as client:
            made = client.runs.get(f"runs/{name}")
        assert (made.parent.name, made.parent.uid) == (parent.name, parent.uid)
        run = ChaosRun(address=self.address, name=made.name, uid=made.uid)
        self._runs.append(run)
        return run

    def cancel_left(self) -> None:
        """Cancel what a failed test left running: the next test needs the workers."""
        runs, self._runs = self._runs, []
        for run in runs:
            if not run.is_over:
                with contextlib.suppress(MillraceError, TimeoutError, AssertionError):
                    run.cancel()

    def submit_patiently(self, *, timeout_s: float = WAITS_S, **overrides: Any) -> ChaosRun:
        """Submit although the orchestrator may be dead at the moment."""
        ends = time.monotonic() + timeout_s
        while True:
            try:
                return self.submit(**overrides)
            except UnavailableError:
                if time.monotonic() > ends:
                    raise
                time.sleep(_POLL_S)

    def finish(self, run: ChaosRun, *, stalls_s: float = STALLS_S) -> Any:
        """Wait until the run has SUCCEEDED by itself and its audit is clean; return the audit's report."""
        try:
            run.wait_done(stalls_s=stalls_s)
        except AssertionError as error:
            logs = "\n".join(f"--- {name}:\n{self.log_of(name, 6)}" for name in SERVICES)
            raise AssertionError(f"{error}\nThe stack said:\n{self.said(12)}\n{logs}") from None
        left = [path.parent.name for path in (self.directory / "scratch").glob("*/owner.lock") if _is_ownerless(path)]
        assert not left, f"killed trainers have left {left} behind"
        return self.audit(run)

    def audit(self, run: ChaosRun, *, store_only: bool = False) -> Any:
        """Audit the run and return the report; with `store_only` from the object store alone.

        Raise AssertionError with all violations.
        """

        async def ask() -> Any:
            if store_only:
                return await audit_run(None, self.store(), prefix=PREFIX, uid=run.uid)
            client = redis.asyncio.Redis.from_url(self.redis_url)
            try:
                return await audit_run(client, self.store(), prefix=PREFIX, uid=run.uid)
            finally:
                await client.aclose()

        report = chaos_loop.call(ask())
        found = [f"{violation.check}: {violation.message}" for violation in report.violations]
        assert not found, "\n".join([f"the audit of {run.name} ({run.uid}) finds:", *found])
        return report

    def store(self) -> ObjectStore:
        """Return the stack's object store."""
        return open_store(self._place()["store"])

    @property
    def store_directory(self) -> Path:
        """Return the directory of the stack's object store, if that is one."""
        return Path(self._place()["store"].removeprefix("file://"))

    @property
    def redis_url(self) -> str:
        """Return the URL of the stack's Redis, with its password; `stack.json` only says where that stands."""
        given = self._env.get("MILLRACE_REDIS_URL")
        return given or Path(self._place()["redis_url_file"]).read_text().strip()

    def redis(self) -> redis.Redis:
        """Return a client of the stack's Redis."""
        return redis.Redis.from_url(self.redis_url)

    def _serves(self, name: str) -> bool:
        if name == "redis":
            with contextlib.suppress(redis.RedisError), contextlib.closing(self.redis()) as client:
                return bool(client.ping())
            return False
        with contextlib.suppress(UnavailableError):
            return probe(self._place()["addresses"][name], timeout_s=2.0)
        return False

    def _place(self) -> dict[str, Any]:
        """Return `stack.json`; empty before the stack is ready."""
        try:
            return json.loads((self.directory / "stack.json").read_text())
        except FileNotFoundError:
            return {}


def _is_ownerless(lock: Path) -> bool:
    """Return whether nobody holds a scratch directory's lock; False if it is gone."""
    with contextlib.suppress(OSError), lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock.exists()
    return False


@contextlib.contextmanager
def timed(title: str) -> Iterator[None]:
    """Print how long the block took."""
    began = time.monotonic()
    yield
    print(f"{title}: {time.monotonic() - began:.1f} s")
