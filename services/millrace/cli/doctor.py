"""The checks of `millrace doctor`: API, Redis, object store and GPUs, one after the other; and its `--plan`."""

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.cli.connection import environ as with_options
from millrace.cli.connection import explain_unreachable, stack_at
from millrace.cli.view.text import table
from millrace.errors import InvalidStateError, MillraceError
from millrace.telemetry.logging import redact
from millrace.telemetry.settings import Settings

if TYPE_CHECKING:
    from millrace.config import RLConfig

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of one check; `is_good` is None if it was skipped."""

    what: str
    is_good: bool | None
    text: str
    remedy: str = ""


async def examine(
    server: str, origin: str, *, directory: Path | None = None, environ: Mapping[str, str] = os.environ
) -> list[CheckResult]:
    """Check API, Redis, object store and GPUs, and return the results in that order.

    `server` is the orchestrator's address, `origin` says where it came from. URLs that the environment does not set are
    taken from the stack that listens at `server`, in `directory` or below `outputs`. Failures are results; only broken
    settings raise (InvalidSpecError).
    """
    settings = Settings.from_env(with_options(environ))
    found = stack_at(server, directory)
    stack = {} if found is None else found.says
    redis_url = settings.redis_url or _redis_of(stack)
    store_url = settings.store_url or stack.get("store")
    results = [await _asked("API", lambda: _api(server, origin, directory))]
    if redis_url:
        results.append(await _asked("Redis", lambda: _redis(redis_url, settings.prefix)))
    else:
        results.append(_skipped("Redis", "MILLRACE_REDIS_URL", directory))
    if store_url:
        results.append(await _asked("object store", lambda: _store(store_url, settings.prefix)))
    else:
        results.append(_skipped("object store", "MILLRACE_STORE_URL", directory))
    results.append(await _asked("GPUs", _gpus))
    return results


async def _gpus() -> str:
    """Describe GPUs, driver and torch wheel of this machine.

    Raises InvalidStateError if driver or wheel cannot use the GPU.
    """
    from millrace.local.gpus import CUDA_13_DRIVER, DEVICE, driver_version, is_too_old, machine_gpus, wheel_version

    found = await asyncio.to_thread(machine_gpus)
    driver, wheel, is_there = driver_version(), wheel_version(), await asyncio.to_thread(DEVICE.exists)
    needs = f"wheels of CUDA 13 need {CUDA_13_DRIVER} or newer"
    if not found and not is_there:
        return "none on this machine: the trainer computes on the CPU"
    if not found:
        raise InvalidStateError(
            f"the kernel shows a GPU (driver {driver or 'unknown'}), and nvidia-smi lists none",
            reason="GPU_UNUSABLE",
            remedy=f"fix the driver; {needs}",
        )
    if is_too_old(driver, wheel) and os.environ.get("MILLRACE_TRAINER_DEVICE") != "cpu":
        raise InvalidStateError(
            f"{len(found)} of NVIDIA, and driver {driver} is older than torch {wheel} needs",
            reason="GPU_UNUSABLE",
            remedy=f"install a newer driver ({needs}), or an older wheel of torch",
        )
    here = f"{len(found)} of NVIDIA, driver {driver or 'unknown'}"
    if wheel.endswith("+cpu"):
        return f"{here}; torch {wheel} is made for CPUs: the trainer computes there"
    return f"{here}{f', torch {wheel}' if wheel else ''} ({needs})"


def _redis_of(stack: Mapping[str, Any]) -> str | None:
    """Return the Redis URL of a stack, read from its file; None if there is no such file.

    `stack.json` has only the path, because the URL contains a password.
    """
    try:
        return Path(str(stack["redis_url_file"])).read_text().strip()
    except (KeyError, OSError):
        return None


def _skipped(what: str, variable: str, directory: Path | None) -> CheckResult:
    """Return the result of a check that is skipped, because `variable` is not set and no stack has the address."""
    where = "below outputs" if directory is None else f"of {directory}"
    text = f"not looked at: {variable} is not set here, and no stack {where} has this address"
    return CheckResult(what=what, is_good=None, text=text)


async def _asked(what: str, ask: Callable[[], Awaitable[str]]) -> CheckResult:
    """Return the result of one check: the text that `ask` returns with its time, or the error that it raises.

    A check may take 30 s.
    """
    began = time.monotonic()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            text = await ask()
    except MillraceError as error:
        return CheckResult(what=what, is_good=False, text=error.message, remedy=error.remedy or "")
    except TimeoutError:
        return CheckResult(what=what, is_good=False, text=f"no answer within {TIMEOUT_S:g} s")
    return CheckResult(what=what, is_good=True, text=f"{text}, {1000 * (time.monotonic() - began):.0f} ms")


async def _api(server: str, origin: str, directory: Path | None) -> str:
    """Ask the orchestrator for a run, and return a text about its answer.

    Raise UnavailableError if it does not answer.
    """
    from millrace.cli.connection import open_client

    with explain_unreachable(origin, server, directory=directory):
        async with open_client(server) as client:
            runs = await client.runs.list(limit=1)
    return f"{server} answers, {'with' if runs else 'without'} runs"


async def _redis(url: str, prefix: str) -> str:
    """Check the Redis at `url`, and return a text about how it keeps its data.

    Raises MillraceError if it is not fit for runs, InvalidStateError if it evicts entries.
    """
    try:
        import redis.asyncio
        import redis.exceptions
    except ImportError:
        return "not looked at: the redis package is not installed here"
    from millrace.local.preflight import check_redis

    await check_redis(url, prefix=prefix)
    client = redis.asyncio.from_url(url, socket_connect_timeout=5, decode_responses=True)
    try:
        memory, persistence = await client.info("memory"), await client.info("persistence")
    except redis.exceptions.RedisError as error:  # one of somebody else's, that does not tell everybody
        return f"{redact(url)} answers, and does not say how it keeps its data: {redact(str(error))}"
    finally:
        await client.aclose()
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise InvalidStateError(
            f"Redis at {redact(url)} evicts entries when its memory is full (maxmemory-policy {policy})",
            reason="REDIS_EVICTS",
            remedy="set maxmemory-policy noeviction",
        )
    return f"{redact(url)} answers, noeviction, append-only file {'on' if persistence.get('aof_enabled') else 'off'}"


async def _store(url: str, prefix: str) -> str:
    """Test the object store at `url` by writing, reading and deleting a few objects below `prefix`.

    Raise if it is not fit. Return a text for people: that it is fit, or that it was not tested, because boto3 is not
    installed.
    """
    try:
        from millrace.storage import open_store
        from millrace.storage.self_test import self_test
    except ImportError:
        return "not looked at: boto3 is not installed here"
    store = open_store(url)
    answered = await asyncio.to_thread(self_test, store, prefix=prefix)
    await asyncio.wrap_future(answered)
    return f"{store.describe()} keeps its promises"


# `millrace doctor --plan`: what a run takes of everything but GPUs, from its config and from measured figures.
#
# RLConfig, RunLoad  →  plan  →  PlanLine, by resource, with its share of a limit  →  what breaks first


@dataclass(frozen=True, slots=True)
class MeasuredFigure:
    """A figure of Millrace itself that plans are made of."""

    value: float
    unit: str
    what: str
    source: str
    """How it was measured, such as by a script in benchmarks, or the page that says so."""


_EARLIER = "an earlier build"
_PERFORMANCE = "docs/performance.md"
FIGURES: Mapping[str, MeasuredFigure] = {
    "read_token_s": MeasuredFigure(0.2e-6, "CPU s", "orchestrator, to read a token", _EARLIER),
    "read_rollout_s": MeasuredFigure(0.21e-3, "CPU s", "orchestrator, to read a rollout", _EARLIER),
    "commit_token_s": MeasuredFigure(0.18e-6, "CPU s", "orchestrator, to commit a token", "scale.py commits"),
    "dispatch_s": MeasuredFigure(0.6e-3, "CPU s", "orchestrator, to send a group out", "scale.py workers"),
    "heartbeat_s": MeasuredFigure(0.74e-3, "CPU s", "orchestrator, for a heartbeat", "scale.py workers"),
    "heartbeats": MeasuredFigure(500, "a second", "heartbeats of all workers, at most", "scale.py workers"),
    "workers": MeasuredFigure(1000, "workers", "of one orchestrator", "scale.py workers"),
    "redis_rollout": MeasuredFigure(9, "B", "Redis, for a token of a rollout", _EARLIER),
    "redis_batch": MeasuredFigure(10, "B", "Redis, for a token of a batch", _EARLIER),
    "redis_events": MeasuredFigure(1300, "B", "Redis, for the events of a step", "scale.py runs"),
    "store_token": MeasuredFigure(18, "B", "store, for a token", _EARLIER),
    "store_step": MeasuredFigure(4500, "B", "store, for what a step keeps with retention", "scale.py store"),
    "objects_step": MeasuredFigure(6.4, "writes", "store, for a step", "a soak of 3,331 tiny steps"),
    "objects_tokens": MeasuredFigure(6e-6, "writes", "store, for a token", "a step of 16 M tokens: 108 objects"),
    "play_s": MeasuredFigure(2.3e-3, "CPU s", "env-server, for a rollout, without its environment", _PERFORMANCE),
    "delta_least": MeasuredFigure(0.006, "of its bytes", "a delta of a policy, at least", _EARLIER),
    "delta_most": MeasuredFigure(0.016, "of its bytes", "a delta of a policy, at most", _EARLIER),
    "publish_s": MeasuredFigure(3.5, "CPU s", "all ranks, to publish a billion parameters as a delta", _EARLIER),
}  # fmt: skip
"""What one unit costs. docs/scale.md prints the same table (`figures_table`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLoad:
    """What a config does not say of a run."""

    step_seconds: float
    """How long a step takes."""
    rollout_tokens: int
    """Tokens of a rollout, prompt and replies."""
    replicas: int
    parameters: float
    """Parameters of the policy, in billions; 0 if unknown."""
    env_seconds: float
    """CPU seconds that the environment's own code takes for a rollout."""
    cores: int
    """Processors of a machine with an env-server."""
    redis_gb: float
    """Memory of the machine with Redis, GB."""
    network_gbs: float
    """What the store gives to all replicas together, GB a second."""


@dataclass(frozen=True, slots=True)
class PlanLine:
    """What a run takes of one resource."""

    name: str
    text: str
    numbers: Mapping[str, float]
    """The same as numbers, by name with unit."""
    share: float = 0.0
    """Of what one of it has; more than 1 does not go."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run takes."""

    head: str
    lines: tuple[PlanLine, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def first_limit(self) -> PlanLine:
        """Return the line of the resource that a growing run uses up first: the one with the largest share."""
        return max(self.lines, key=lambda line: line.share)

    def render(self) -> list[str]:
        """Return the plan as text."""
        rows = [(line.name, line.text, f"{line.share:.1%}" if line.share else "") for line in self.lines]
        first = self.first_limit
        end = "it does not go" if first.share > 1 else "of these"
        return [
            self.head,
            table(rows, header=("RESOURCE", "TAKES", "OF ONE")),
            f"breaks first: {first.name}, at {first.share:.1%} of one, {end}",
            *(f"note: {note}" for note in self.notes),
        ]

    def to_json(self) -> dict[str, object]:
        """Return the plan as data."""
        resources = {line.name: {**line.numbers, "share": line.share} for line in self.lines}
        return {"resources": resources, "breaks_first": self.first_limit.name, "notes": list(self.notes)}


def plan_run(config: "RLConfig", load: RunLoad) -> RunPlan:
    """Return what a run of this config takes of each resource under this load, from the figures in `FIGURES`."""
    settings = config.orchestrator
    rollouts = settings.batch_size * settings.oversampling_factor
    tokens, seconds = rollouts * load.rollout_tokens, load.step_seconds
    env_servers = math.ceil(rollouts / seconds * (load.env_seconds + _cost("play_s")) / load.cores)
    head = (
        f"{rollouts:,.0f} rollouts of {load.rollout_tokens:,} tokens in a step of {seconds:g} s: "
        f"{rollouts / seconds:,.1f} rollouts and {_amount(tokens / seconds, 'tokens')} a second"
    )
    lines = [
        *_services(config, load, rollouts=rollouts, tokens=tokens, env_servers=max(1, env_servers)),
        *_storage(config, load, tokens=tokens),
        *_policies(load),
    ]
    notes = ["figures of one version on two busy cores (docs/scale.md), not of this run: measure, and correct the plan"]
    if not load.env_seconds:
        notes.append("the environment's own CPU is left out: --env-seconds N (`millrace env check` measures it)")
    if not load.parameters:
        notes.append("policies are left out: --parameters N, in billions")
    return RunPlan(head, tuple(lines), tuple(notes))


def _services(
    config: "RLConfig", load: RunLoad, *, rollouts: float, tokens: float, env_servers: int
) -> Iterator[PlanLine]:
    """Yield what the run takes of env-servers, of orchestrators, and of an orchestrator's processor.

    `rollouts` and `tokens` are those of a step; `env_servers` is the number of env-servers that the step needs.
    """
    seconds, settings = load.step_seconds, config.orchestrator
    env_cpu = rollouts / seconds * (load.env_seconds + _cost("play_s"))
    groups = rollouts / max(settings.group_sizes.values(), default=settings.rollouts_per_example)
    workers = env_servers + load.replicas + 1
    beats = min(workers, _cost("heartbeats"))
    of_rollouts = tokens * (_cost("read_token_s") + _cost("commit_token_s")) + rollouts * _cost("read_rollout_s")
    cpu = (of_rollouts + groups * _cost("dispatch_s")) / seconds + beats * _cost("heartbeat_s")
    orchestrators = math.ceil(workers / _cost("workers"))
    yield PlanLine(
        "env-servers",
        f"{env_servers} with {load.cores} processors each; {env_cpu:.2f} CPU s a second in all",
        {"count": env_servers, "cpu_per_second": env_cpu},
    )
    yield PlanLine(
        "orchestrators",
        f"{orchestrators}, and one as a successor, for {workers:,} workers",
        {"count": orchestrators, "successors": 1, "workers": workers},
        workers / _cost("workers") / orchestrators,
    )
    yield PlanLine("orchestrator CPU", f"{cpu:.2f} of a core for this run", {"cores": cpu}, cpu)


def _storage(config: "RLConfig", load: RunLoad, *, tokens: float) -> Iterator[PlanLine]:
    """Yield what the run takes of Redis and the store; `tokens` are those of a step."""
    settings, seconds = config.orchestrator, load.step_seconds
    window = settings.async_level + 3
    steps = min(settings.max_steps or _EVENT_STEPS, _EVENT_STEPS)
    held = tokens * window * (_cost("redis_rollout") + _cost("redis_batch")) + steps * _cost("redis_events")
    yield PlanLine(
        "Redis memory",
        f"{_amount(held, 'B')}, for {window} steps and the events of {steps:,}; twice that while it rewrites its file",
        {"bytes": held, "window_steps": window},
        2 * held / (load.redis_gb * 1e9),
    )
    flow = tokens * (_cost("redis_rollout") + _cost("redis_batch")) / seconds
    yield PlanLine("network into Redis", f"{_amount(flow, 'B')} a second", {"bytes_per_second": flow})
    writes = _cost("objects_step") + tokens * _cost("objects_tokens")
    written, day = tokens * _cost("store_token"), 86400 / seconds
    yield PlanLine(
        "store requests",
        f"{writes:,.0f} writes a step, {writes / seconds:,.2f} a second",
        {"writes_per_step": writes, "writes_per_second": writes / seconds},
        writes / seconds / _STORE_WRITES,
    )
    retained = settings.retain_batches
    kept = written * day if retained is None else _cost("store_step") * day
    lasting = "nothing is retired" if retained is None else f"{_amount(written * retained, 'B')} for retain_batches"
    yield PlanLine(
        "store",
        f"{_amount(written, 'B')} a step; {_amount(kept, 'B')} more each day ({lasting})",
        {"bytes_per_step": written, "bytes_per_day": kept},
    )


def _policies(load: RunLoad) -> Iterator[PlanLine]:
    """Yield what publishing and fetching versions takes; nothing if the policy's size is unknown."""
    if not load.parameters:
        return
    # Two bytes, bfloat16, for each parameter.
    whole, seconds = load.parameters * 2e9, load.step_seconds
    least, most = (whole * _cost(name) * load.replicas for name in ("delta_least", "delta_most"))
    yield PlanLine(
        "policy fan-out",
        f"{_amount(least, 'B')} to {_amount(most, 'B')} a step out of the store, {_amount(most / seconds, 'B')} a "
        f"second; a fleet that starts at once reads {_amount(whole * load.replicas, 'B')}",
        {"bytes_per_step_least": least, "bytes_per_step_most": most, "bytes_at_start": whole * load.replicas},
        most / seconds / (load.network_gbs * 1e9),
    )
    publishing = load.parameters * _cost("publish_s")
    yield PlanLine("publishing", f"{publishing:,.0f} CPU s a step on all ranks together", {"cpu_per_step": publishing})


_EVENT_STEPS = 2000  # Redis keeps the newest 2,000 archived events, which are those of fewer steps
_STORE_WRITES = 3500  # a second to one prefix of S3
_STEPS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def _cost(name: str) -> float:
    return FIGURES[name].value


def _amount(value: float, unit: str) -> str:
    """Return a number with its unit, in thousands, millions and so on, such as `1.2 GB`."""
    for letter, size in _STEPS:
        if value >= size:
            return f"{value / size:,.3g} {letter}{unit if unit == 'B' else f' {unit}'}"
    return f"{value:,.3g} {unit}"


def figures_table() -> str:
    """Return `FIGURES` as a table in Markdown, for docs/scale.md."""
    rows = [f"| {each.what} | {each.value:g} {each.unit} |" for each in FIGURES.values()]
    return "\n".join(["| what | figure |", "|---|---|", *rows])
