"""The one-machine stack: Redis, object store, orchestrator, env-server, inference, trainer, each its own process.

    async with LocalStack(StackOptions(directory=Path("outputs/local"))) as stack:
        await stack.start()
        await stack.guard(work(stack.address))     # ends with ProcessDiedError when a process cannot be kept alive

All files are in one directory: `logs/<process>.log` (rotated, see `millrace.local.keeper`), `store/` (the object
store), `redis/`, `spool/` (finished rollouts of the env-server), `scratch/` (checkpoints in transit), `logs/stack.log`
(deaths, restarts, missing answers), and `stack.json`: the addresses, the file with the URL of its Redis, the pids.
Services start at the same time, because each spends seconds on imports. Once all were ready, one that dies is started
again (see `millrace.local.keeper`).
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NoReturn, Self, TypeVar

from millrace.env_server.interpreters import PYTHONS_VARIABLE, own_pythons
from millrace.errors import UnavailableError
from millrace.inference.launch_env import engine_python
from millrace.local import gpus
from millrace.local.directory import StackId, free_ports, hold_directory, require_free
from millrace.local.keeper import Answer, Keeper, Probe, probe_redis, probe_service
from millrace.local.redis import READY_POLL_S, EmbeddedRedis
from millrace.processes import sessions
from millrace.processes.forked import ForkServerClient
from millrace.processes.installed import require_tried
from millrace.processes.supervisor import ProcessSpec, Supervisor, tail
from millrace.race import first_of
from millrace.rpc.access import ClientAccess
from millrace.storage.clean_up import remove
from millrace.storage.scratch import SCRATCH_VARIABLE, sweep
from millrace.telemetry import waits
from millrace.telemetry.logging import redact
from millrace.telemetry.settings import Settings, join_address, parse_address, variable_name

HOST = "127.0.0.1"
READY_DEADLINE_S = 180.0  # imports of torch and transformers take 70 s on a busy two-core machine
VLLM_SETTLED_AFTER_S = 300.0
"""Its launcher answers at once; a vLLM that cannot run the model dies a minute or two later, again and again."""
REDIS_DEADLINE_S = 20.0
SAY_WAIT_AFTER_S = 10.0
_POLL_S = 0.1
_TO_REDIS = ("LD_", "FAKETIME", "NO_FAKE")
"""Prefixes of variables that Redis inherits, which change how any program runs; it needs no other variable."""

SERVICES = {
    "orchestrator": "millrace.orchestrator.main",
    "env-server": "millrace.env_server.main",
    "inference": "millrace.inference.main",
    "trainer": "millrace.trainer.main",
}

T = TypeVar("T")
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """The parts of a stack. None chooses: a free loopback port, the embedded Redis, the filesystem store."""

    directory: Path
    listen: str | None = None
    """host:port of the orchestrator."""
    http_host: str = HOST
    http_port: int | None = None
    """The port of the engine's HTTP API."""
    dashboard_port: int | None = None
    """The port of the dashboard, on loopback."""
    engine: str = "embedded"
    """embedded or vllm; the process of the latter runs in the interpreter that has vLLM."""
    engine_environ: Mapping[str, str] = field(default_factory=dict)
    """Variables for the engine's process alone, such as its limits, beside the environment's."""
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The GPUs that a service sees, by its name; a service without an entry sees all."""
    redis_url: str | None = None
    redis_url_file: str | None = None
    """The file that `redis_url` was read from, if it was: then the services get its path in place of the URL."""
    store_url: str | None = None
    prefix: str = "millrace"
    log_level: str = "INFO"
    log_json: bool = False
    is_durable: bool = True
    """Whether the embedded Redis keeps an append-only file, which a later stack in the directory reads."""
    is_restarting: bool = True
    """Whether a process that dies after the start is started again; else its death ends the stack."""
    has_liveness: bool = True
    """Whether a process that does not answer its health check for long is killed."""
    access: Settings = field(default_factory=Settings)
    """Certificates and tokens of the stack, as `Settings.of_stack` gives them; by default none."""

    def with_settings(self, settings: Settings) -> Self:
        """Return a copy of these options with Redis, store, prefix and access of `settings`, which come from the
        environment.
        """
        return replace(
            self,
            redis_url=settings.redis_url,
            redis_url_file=settings.redis_url_file,
            store_url=settings.store_url,
            prefix=settings.prefix,
            access=settings.of_stack(),
        )


class LocalStack:
    """The one-machine stack; leaving the `async with` block stops it."""

    def __init__(
        self,
        options: StackOptions,
        *,
        note: Note = lambda _: None,
        environ: Mapping[str, str] = os.environ,
        modules: Mapping[str, str] = SERVICES,
        ready_deadline_s: float = READY_DEADLINE_S,
    ) -> None:
        """Make a stack that is not started.

        `note` gets messages for the user, such as on long waits. `environ` is what services inherit. `modules` has the
        main module of each service by its name. A service that is not ready within `ready_deadline_s` seconds is an
        error.
        """
        self.options = options
        self.directory = options.directory.resolve()
        self._id = StackId.new(self.directory)
        self.supervisor = Supervisor(stack_id=str(self._id), note=self._report)
        self.address = ""
        """host:port of the orchestrator, once started."""
        self._note = note
        self._environ = environ
        self._engine_python = sys.executable
        self._modules = modules
        self._ready_deadline_s = ready_deadline_s
        self._lock: IO[str] | None = None
        self._redis_url_file = options.redis_url_file
        self._where: dict[str, object] = {}
        self._dashboard = ""
        self._log_sizes: dict[str, int] = {}
        self._store_answered: Future[None] | None = None
        self.keeper: Keeper | None = None
        self._keeping: asyncio.Task[NoReturn] | None = None

    @property
    def logs(self) -> Path:
        """Return the directory of the processes' logs."""
        return self.directory / "logs"

    @property
    def access(self) -> ClientAccess:
        """Return how a client calls the stack's public API: its certificates and token."""
        return ClientAccess.public(self.options.access)

    @property
    def http_url(self) -> str:
        """Return the URL of the engine's HTTP API, once started."""
        return str(self._where["http"])

    @property
    def dashboard_url(self) -> str:
        """Return the URL of the dashboard, once started."""
        return str(self._where["dashboard"])

    async def __aenter__(self) -> Self:
        """Lock the stack's directory and begin to supervise, without starting a process.

        Raises InvalidStateError if another stack runs in the directory.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = self._lock = await hold_directory(self.directory, self._id, note=self._note)
        sweep(self.directory / "scratch")  # left by a stack that was killed
        # Every process of the stack gets the locked file: the lock ends with the last of them.
        self.supervisor.lock = lock.fileno()
        await self.supervisor.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Stop all processes of the stack, and free its directory."""
        # The keeper first: it would start again what the supervisor stops.
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        try:
            await self.supervisor.stop_for_sure()
            sweep(self.directory / "scratch")
        finally:
            # Before the lock is free: the next stack in the directory writes a file of its own.
            remove(self.directory / "stack.json", what="description of a stack")
            if self._lock is not None:
                self._lock.close()

    async def start(self) -> None:
        """Start all processes and return when every service is healthy; from then on those that die are started again.

        Raises UnavailableError for a taken port, an unreachable Redis or store, and a service that is not ready in
        time; ProcessDiedError as soon as a process dies.
        """
        await self.guard(self._start())

    async def _start(self) -> None:
        """Start Redis, store and services, wait until all are ready, and begin to keep them alive.

        Errors are those of `start`.
        """
        self._engine_python = engine_python(self.options.engine, self._environ)
        require_tried("local", self._environ)
        if any(self.options.gpus.values()):
            gpus.require(self.options.gpus, gpus.machine_gpus(self._environ))
        ports = self._choose_ports()
        self._start_fork_server()  # it imports while Redis starts
        probes: dict[str, Probe] = {}
        if redis_url := self.options.redis_url:
            # Its client costs 0.1 s, and only what others run needs it.
            from millrace.local.preflight import check_redis

            await check_redis(redis_url, prefix=self.options.prefix)
        else:
            redis = await self._start_redis(ports["redis"])
            redis_url, probes["redis"] = redis.url, probe_redis(redis)
            self._redis_url_file = str(redis.url_file)
        store_url = await self._open_store()
        addresses = {name: f"{HOST}:{ports[name]}" for name in self._modules}
        exported = {name: f"{HOST}:{ports[f'metrics of {name}']}" for name in self._modules if name != "inference"}
        self.address = addresses["orchestrator"] = self.options.listen or addresses["orchestrator"]
        http = join_address(self.options.http_host, ports["http"])
        self._dashboard = f"{HOST}:{ports['dashboard']}"
        for name in self._modules:
            path = self.logs / f"{name}.log"
            # The file also has the lines of earlier stacks, which are not shown as those of this service.
            self._log_sizes[name] = path.stat().st_size if path.exists() else 0
            await self.supervisor.start(self.service_spec(name, addresses, http, exported, redis_url, store_url))
        await self._wait_ready(addresses)
        if self._store_answered is not None:
            with waits.waiting("the last answers of the store's self-test", waits_on="store"):
                await asyncio.wrap_future(self._store_answered)
        scheme = "https" if self.options.access.tls_cert else "http"
        self._where = {
            "address": self.address,
            "http": f"{scheme}://{http}/v1",
            "dashboard": f"{scheme}://{self._dashboard}",
            "metrics": {name: f"{scheme}://{at}/metrics" for name, at in {**exported, "inference": http}.items()},
            "logs": str(self.logs),
            "pid": os.getpid(),
            "start_ticks": self._id.start_ticks,
            "is_durable": self.options.is_durable,
            "looks_in": [os.getcwd(), sys.prefix],
            "addresses": addresses,
            "redis": redact(redis_url),
            "redis_url_file": self._redis_url_file,
            "store": store_url,
            "settings": self._settings(),
        }
        access = self._peers()
        self._keep({**probes, **{name: probe_service(address, access) for name, address in addresses.items()}})

    async def _open_store(self) -> str:
        """Return the URL of the object store: of the configured one, which is tested, or of a directory of the
        stack, made here.
        """
        if store_url := self.options.store_url:
            from millrace.local.preflight import check_store

            self._store_answered = await check_store(store_url, prefix=self.options.prefix)
            return store_url
        directory = self.directory / "store"
        directory.mkdir(exist_ok=True)
        return directory.as_uri()

    def _settings(self) -> dict[str, Any]:
        """Return the keys of a run's config that the running stack has decided, with their values."""
        return {
            "inference.engine": self.options.engine,
            "inference.server.port": self.options.http_port,
            "log.level": self.options.log_level.lower(),
            "log.json_logging": self.options.log_json,
        }

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` and return its result; raise ProcessDiedError if a process dies meanwhile and is not started
        again.

        While the stack is starting no process is started again: then every death is such an error, also one that comes
        at the moment at which `work` ends.
        """
        is_starting = self._keeping is None
        done, death = await first_of(work, self._wait_failure())
        if done is not None and (death is None or not is_starting):
            return done.result()
        assert death is not None  # also if the start ends at the same moment: the death would not be reported again
        raise death.result()

    def _keep(self, probes: Mapping[str, Probe]) -> None:
        """Begin to keep the processes alive, each checked by its probe, and write `stack.json`."""
        self.keeper = Keeper(
            self.supervisor,
            probes,
            note=self._report,
            on_change=self._write_json,
            ready_deadline_s=self._ready_deadline_s,
            is_restarting=self.options.is_restarting,
            has_liveness=self.options.has_liveness,
            settled_after_s={"inference": VLLM_SETTLED_AFTER_S} if self.options.engine == "vllm" else {},
        )
        self.keeper.logs = self.logs
        self._write_json()
        self._report("the stack is ready", is_shown=False)
        self._keeping = asyncio.create_task(self.keeper.run(), name="keeper of the stack")

    async def _wait_failure(self) -> BaseException:
        """Wait for the error that ends the stack, and return it.

        Before the stack is ready that is any death, then the death of a process that is given up.
        """
        if self._keeping is None:
            return await self.supervisor.wait_death()
        await asyncio.wait({self._keeping})
        return self._keeping.exception() or RuntimeError("the keeper ended")

    def _report(self, text: str, *, is_shown: bool = True) -> None:
        """Write a message into the stack's own log and, with `is_shown`, pass it to the user."""
        self.logs.mkdir(parents=True, exist_ok=True)
        with (self.logs / "stack.log").open("a") as file:
            file.write(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {text}\n")
        if is_shown:
            self._note(text)

    def _write_json(self) -> None:
        """Write `stack.json`: addresses, pids, and how often each process was started again."""
        pids = {name: child.pid for name, child in self.supervisor.children.items()}
        again = self.keeper.restarts() if self.keeper else {}
        # Renamed when it is whole, because other commands may read it at any time.
        fresh = self.directory / "stack.json.new"
        server = self.supervisor.fork_server
        found = {**self._where, "pids": pids, "restarts": again, "fork_server": server and server.pid}
        fresh.write_text(json.dumps(found, indent=2) + "\n")
        fresh.rename(self.directory / "stack.json")

    def _choose_ports(self) -> dict[str, int]:
        """Return a port for each server of the stack, by its purpose.

        Raise UnavailableError if a configured one is taken.
        """
        taken = {port for port in (self.options.http_port, self.options.dashboard_port) if port}
        if self.options.listen:
            host, port = parse_address(self.options.listen)
            taken.add(port)
            require_free(host, port, purpose="the orchestrator's gRPC server", option="--listen HOST:PORT")
        if self.options.http_port:
            require_free(
                self.options.http_host,
                self.options.http_port,
                purpose="the inference engine's HTTP API",
                option="--inference.server.port (millrace rl) or --http-port (millrace up)",
            )
        if self.options.dashboard_port:
            require_free(HOST, self.options.dashboard_port, purpose="the dashboard", option="--dashboard-port")
        names = ["redis", "http", "dashboard", *self._modules, *(f"metrics of {name}" for name in self._modules)]
        ports = dict(zip(names, free_ports(len(names), but=taken), strict=True))
        if self.options.http_port:
            ports["http"] = self.options.http_port
        if self.options.dashboard_port:
            ports["dashboard"] = self.options.dashboard_port
        return ports

    async def _start_redis(self, port: int) -> EmbeddedRedis:
        """Start the embedded Redis on a port and return it when it answers; raise UnavailableError if it does not."""
        kept = "everysec" if self.options.is_durable else "none"
        redis = EmbeddedRedis(self.directory / "redis", port=port, append_only=kept, log_path=self.logs / "redis.log")
        await self.supervisor.start(
            ProcessSpec(
                # Redis knows no lifeline: `sessions`, run as a program, has the kernel end it with this process.
                name="redis",
                argv=[sys.executable, "-I", "-S", sessions.__file__, str(os.getpid()), *redis.command()],
                env={name: value for name, value in self._environ.items() if name.startswith(_TO_REDIS)},
                log_path=redis.log_path,
                tier=0,
            )
        )
        await _wait_redis(redis)
        return redis

    def service_spec(
        self,
        name: str,
        addresses: Mapping[str, str],
        http: str,
        exported: Mapping[str, str],
        redis_url: str,
        store_url: str,
    ) -> ProcessSpec:
        """Return what the supervisor needs to start the service `name`: command, variables, log.

        `addresses` and `exported` (of metrics) are host:port by service; `http` is that of the engine's HTTP API.
        `redis_url` and `store_url` are where the services find the log.
        """
        settings = replace(
            self.options.access,
            token=None,  # the clients' own
            token_file=None,
            redis_url=redis_url,
            redis_url_file=self._redis_url_file,
            store_url=store_url,
            prefix=self.options.prefix,
            listen=addresses[name],
            orchestrator=None if name == "orchestrator" else addresses["orchestrator"],
            http_listen=http if name == "inference" else None,
            metrics_listen=exported.get(name),
            dashboard_listen=(self._dashboard or None) if name == "orchestrator" else None,
            log_level=self.options.log_level.upper(),
            log_json=self.options.log_json,
            queue_groups=self._environ.get(variable_name("queue_groups"), ""),
            drain_s=0.0,  # there is no load balancer in front of these
            grace_s=3.0,
        )
        # The environment's own placement variables are about other processes; all others are passed on.
        placement = {variable_name(part.name) for part in fields(Settings)}
        inherited = {key: value for key, value in self._environ.items() if key not in placement}
        if name == "inference" and self.options.engine == "vllm":
            inherited.pop("PYTHONDONTWRITEBYTECODE", None)  # vLLM imports in 16 s without bytecode, in 8 s with it
        python = self._engine_python if name == "inference" else sys.executable
        ranks = self._ranks(name)
        return ProcessSpec(
            name=name,
            # Later ones win: the environment over our defaults, the stack's own settings over the environment.
            argv=[python, *ranks, "-m", self._modules[name]],
            env={**self._defaults(), **inherited, **settings.to_environ(), **self._own(name)},
            log_path=self.logs / f"{name}.log",
            module=self._modules[name] if python == sys.executable and not ranks else None,
        )

    def _defaults(self) -> dict[str, str]:
        """Return the default variables of every service, which the environment overrides."""
        # More threads than cores collapse throughput, and there are four services on this machine.
        defaults = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        return {**defaults, SCRATCH_VARIABLE: str(self.directory / "scratch")}  # /tmp is memory on many machines

    def _start_fork_server(self) -> None:
        """Start the process that services are forked from, with their imports done, if any may be forked."""
        is_vllm = self.options.engine == "vllm"
        modules = [module for name, module in self._modules.items() if not (is_vllm and name == "inference")]
        if preloaded := needs(modules, self._environ):
            server = ForkServerClient(preloaded, log_path=self.logs / "fork-server.log")
            self.supervisor.start_fork_server(server, env={**self._defaults(), **self._environ})

    def _peers(self) -> ClientAccess:
        """Return the access with which the stack's processes call each other."""
        return ClientAccess.internal(self.options.access)

    def _own(self, name: str) -> dict[str, str]:
        """Return the environment variables that only this service gets."""
        ids = self.options.gpus.get(name)
        visible = {} if ids is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, ids))}
        if name == "trainer" and ids:
            visible["MILLRACE_TRAINER_DEVICE"] = "cuda"  # rather an error than silent training on the CPU
        return {**visible, **self._settings_of(name)}

    def _ranks(self, name: str) -> list[str]:
        """Return the arguments of Python that start the trainer as a gang with one process for each GPU.

        Empty for other services, and for a trainer with one GPU or none. A free port is chosen for the gang.
        """
        count = len(self.options.gpus.get(name, ()))
        if name != "trainer" or count < 2:
            return []
        where = ["--master-addr=127.0.0.1", f"--master-port={free_ports(1)[0]}"]
        return ["-m", "torch.distributed.run", f"--nproc-per-node={count}", *where]

    def _settings_of(self, name: str) -> dict[str, str]:
        """Return the environment variables of a service that say what it is to run, such as the engine."""
        match name:
            case "inference":
                return {**self.options.engine_environ, "MILLRACE_ENGINE": self.options.engine}
            case "orchestrator" | "trainer":  # the user's own process: their code may run in it
                return {} if "MILLRACE_CUSTOM_CODE" in self._environ else {"MILLRACE_CUSTOM_CODE": "*"}
            case "env-server":
                pythons = os.pathsep.join(own_pythons(self._environ))
                return {"MILLRACE_SPOOL_DIR": str(self.directory / "spool"), PYTHONS_VARIABLE: pythons}
            case _:
                return {}

    async def _wait_ready(self, addresses: Mapping[str, str]) -> None:
        """Wait until every service is healthy, by its address.

        Raise UnavailableError for the first that is not in time.
        """
        reporter = asyncio.create_task(self._report_waits(), name="report of waits")
        try:
            async with asyncio.TaskGroup() as tasks:
                for name, address in addresses.items():
                    tasks.create_task(self._wait_healthy(name, address))
        except* UnavailableError as group:
            raise group.exceptions[0] from None
        finally:
            reporter.cancel()
            await asyncio.gather(reporter, return_exceptions=True)

    async def _wait_healthy(self, name: str, address: str) -> None:
        """Wait until a service is healthy; raise UnavailableError with the end of its log after the deadline."""
        ends = time.monotonic() + self._ready_deadline_s
        probe = probe_service(address, self._peers())
        with waits.waiting(f"{name} to be ready", waits_on=name, deadline_s=self._ready_deadline_s):
            while time.monotonic() < ends:
                # Silent until the process has bound its port; `guard` notices its death.
                if await probe() is Answer.SERVING:
                    return
                await asyncio.sleep(_POLL_S)
        path = self.logs / f"{name}.log"
        own = tail(path, after=self._log_sizes.get(name, 0))
        shown = "\n".join(f"  | {line}" for line in own) or "  | (it wrote nothing)"
        raise UnavailableError(
            f"{name} was not ready within {self._ready_deadline_s:g} s. The last lines of its log:\n{shown}",
            reason="SERVICE_NOT_READY",
            remedy=f"read {path}; a machine that is busy needs longer",
        )

    async def _report_waits(self) -> None:
        """Pass the user what is waited for, with the last line of each service's log, every `SAY_WAIT_AFTER_S` until
        cancelled.
        """
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            await asyncio.sleep(SAY_WAIT_AFTER_S)
            pending = waits.snapshot("millrace", min_age_s=SAY_WAIT_AFTER_S / 2)
            silent = []
            for wait in pending:
                path = self.logs / f"{wait.waits_on}.log"
                last = tail(path, 1, after=self._log_sizes.get(wait.waits_on, 0))
                if last:
                    self._note(f"waiting for {wait.reason} ({_of(wait)}): {last[0][:120]}")
                else:
                    silent.append(wait)
            if silent:  # most services import for seconds before they write anything: one line for all
                names = ", ".join(wait.waits_on for wait in silent)
                self._note(f"waiting for {names} to be ready ({_of(silent[0])}); no output yet")


def _of(wait: waits.Wait) -> str:
    """Return a wait's age and its deadline as text, such as "3 s of 60 s"."""
    return f"{wait.age_s:.0f} s of {wait.deadline_s:.0f} s"


async def _wait_redis(redis: EmbeddedRedis) -> None:
    """Wait until the server answers; raise UnavailableError after `REDIS_DEADLINE_S`.

    The caller watches for the server's death.
    """
    with waits.waiting("redis to be ready", waits_on="redis", deadline_s=REDIS_DEADLINE_S):
        try:
            async with asyncio.timeout(REDIS_DEADLINE_S):
                while not await asyncio.to_thread(redis.is_ready):  # noqa: ASYNC110 - another process has no event
                    await asyncio.sleep(READY_POLL_S)
        except TimeoutError:
            raise redis.failed(f"did not answer within {REDIS_DEADLINE_S:g} s") from None


# The services of a one-machine stack that are forked from a process with their imports, and these imports.
VARIABLE = "MILLRACE_FORK_SERVER"
"""With the value 0 every service of a one-machine stack starts as a program of its own."""
NEEDS: Mapping[str, Sequence[str]] = {
    "millrace.orchestrator.main": ("millrace.orchestrator.main", "millrace.orchestrator.serve"),
    "millrace.env_server.main": ("millrace.env_server.main", "millrace.env_server.run"),
    "millrace.inference.main": (
        "millrace.inference.main",
        "millrace.inference.embedded.replica",
        "transformers.modeling_utils",
        "transformers.models.auto.modeling_auto",
    ),
    "millrace.trainer.main": (
        "millrace.trainer.main",
        "millrace.trainer.serve",
        "millrace.trainer.gang.distributed",
        "millrace.trainer.job",
        "millrace.trainer.model.pretrained",
    ),
}
"""The modules that each service imports before it works, lighter ones first."""
WITH_TORCH = ("millrace.inference.main", "millrace.trainer.main")
GPUS = ("/dev/nvidiactl", "/dev/kfd")


def needs(modules: Iterable[str], environ: Mapping[str, str]) -> dict[str, Sequence[str]]:
    """Return the modules to import before a fork, for each of these services' main modules that may be forked.

    None may elsewhere than on Linux, or if `VARIABLE` is 0 in `environ`, and services with torch may not on a machine
    with a GPU: the state of a driver does not survive a fork.
    """
    if environ.get(VARIABLE, "1") == "0" or not hasattr(os, "pidfd_open") or not Path("/proc/self/stat").exists():
        return {}
    has_gpu = any(Path(path).exists() for path in GPUS)
    return {name: NEEDS[name] for name in modules if name in NEEDS and not (has_gpu and name in WITH_TORCH)}
