"""Our env-server against the servers that verifiers brings, with an engine that answers at once.

    python benchmarks/env_server.py [--quick] [--rounds 2] [--in-flight 512] [--rollouts 4096] [--rollouts-v1 1536]
        [--apis v0 v1] [--workers 1 2] [--group 16] [--tokens 32] [--whole]

One cell is a generation of verifiers' API and a number of worker processes. Both servers of a cell stand at the same
time, play the same environment (the demo's for v0, a taskset of the tests that reverses texts too for v1, there both
with a harness in its process, because verifiers' own starts a process per rollout) with the same scripted engine
(`scripted_engine.py`), and take turns: ours, verifiers', ours, verifiers'. A turn keeps `--in-flight` rollouts in
flight until so many are over, its beginning and its end included, and each rollout's tokens are looked at.

Ours is asked as our orchestrator asks, by groups over gRPC, and a rollout counts when it was read from the run's log in
Redis, where it is durable; verifiers' server is asked rollout by rollout with its own client over ZeroMQ, as prime-rl
does. Its answer is lost if either process dies. CPU seconds, user and system, are those of the server with all its
workers (ours: with Redis), and those of the caller; the engine's are left out. `--whole`: the engine sends no choices
one by one, so that ours sends one request per rollout, too. Other programs on the machine disturb CPU seconds little;
wall times are of use only side by side.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from cpu_seconds import cpu_by_process
from env_server_hosts import ENVIRONMENTS, HARNESS, HARNESS_SOURCE, V1_TASKSET, v1_config
from report import REPOSITORY, end_like_interrupt, machine, progress, quantile, table
from scripted_engine import MODEL
from workplace import Workplace

from millrace.internal.v1 import env_service_pb2, env_service_pb2_grpc, play_pb2, rollout_pb2
from millrace.local.directory import free_ports
from millrace.local.redis import EmbeddedRedis
from millrace.policies.manifest import PolicyPlace
from millrace.policies.publish import PolicyContents, publish_policy
from millrace.policies.tensors import TensorBytes
from millrace.rollouts.types import RolloutStatus
from millrace.rollouts.wire import decode_rollout
from millrace.rpc.channel import call, open_channel
from millrace.runlog.names import Stream
from millrace.runlog.redis.connection import open_redis
from millrace.runlog.redis.log import RunLog
from millrace.storage.local import LocalStore

HERE = Path(__file__).parent
TASKSETS = REPOSITORY / "tests" / "fixtures" / "environments" / "rev_text_v1"
START_S = 240.0
TURN_S = 900.0
STOP_S = 30.0
POLL_S = 0.1
NUM_TASKS = 64
WARM_UP = 64
TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a turn asks for."""

    rollouts: int
    in_flight: int
    group: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a turn took."""

    rollouts_per_s: float
    p50_s: float
    p99_s: float
    server_cpu_ms: float
    """Per rollout, as the next."""
    caller_cpu_ms: float


class Contender(Protocol):
    """A server with its caller."""

    name: str
    pids: Sequence[int]

    async def play(self, load: Load) -> Sequence[float]:
        """Play so many rollouts; seconds from the request to the answer of each. RuntimeError if one is not good."""
        ...

    async def close(self) -> None:
        """End the caller."""
        ...


async def keep_in_flight(count: int, limit: int, play: Callable[[int], Awaitable[None]]) -> None:
    """Await `play(number)` of `count` numbers, `limit` of them at the same time."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await play(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(limit, count)):
            group.create_task(worker())


class Ours:
    """Our service, asked over gRPC, read from the log."""

    name = "Millrace"

    def __init__(
        self, api: str, place: Path, pids: Sequence[int], redis_url: str, engine: str, tokenizer: Path
    ) -> None:
        self.pids = pids
        self._api, self._place, self._redis_url, self._engine = api, place, redis_url, engine
        self._tokenizer = tokenizer
        self._ordinal = 0

    async def open(self) -> None:
        """Make a run and have the environment loaded."""
        self._store, self._redis = LocalStore(self._place / "store"), open_redis(self._redis_url)
        uid = f"b{uuid.uuid4().hex[:12]}"
        self._log = await RunLog.create(self._redis, self._store, "bench", uid, b'{"run_hash": "0"}')
        self._channel = open_channel((self._place / "address").read_text())
        self._stub: Any = env_service_pb2_grpc.EnvServiceStub(self._channel)
        env_id = ENVIRONMENTS[self._api]
        args = {"num_examples": V1_TASKSET["num_examples"]} if self._api == "v1" else {"num_train": NUM_TASKS}
        self._spec = play_pb2.EnvSpec(name=env_id, id=env_id, args_json=json.dumps(args))
        contents = PolicyContents(
            tensors=[("w", TensorBytes.from_numpy(np.zeros(2, np.float32)))],
            files={path.name: path.read_bytes() for path in self._tokenizer.iterdir() if path.suffix != ".safetensors"},
        )
        policy = PolicyPlace(prefix="bench", uid=uid, lineage=0, version=0)
        self._manifest = (
            publish_policy(self._store, policy, contents, epoch=1).manifest_key if self._api == "v1" else ""
        )
        async with asyncio.timeout(START_S):
            while True:
                reply = await call(self._stub.OpenEnv, env_service_pb2.OpenEnvRequest(env=self._spec), timeout_s=60)
                if reply.state == env_service_pb2.ENV_STATE_FAILED:
                    raise RuntimeError(f"the environment does not load: {reply}")
                if reply.state == env_service_pb2.ENV_STATE_READY:
                    return
                await asyncio.sleep(POLL_S)

    async def play(self, load: Load) -> Sequence[float]:
        """By groups: the next one begins when the last rollout of another was read."""
        began: dict[int, float] = {}
        left: dict[int, int] = {}
        ended: dict[int, asyncio.Event] = {}
        taken: list[float] = []
        num_groups = load.rollouts // load.group

        async def play_group(_: int) -> None:
            ordinal, self._ordinal = self._ordinal, self._ordinal + 1
            left[ordinal], ended[ordinal] = load.group, asyncio.Event()
            began[ordinal] = time.monotonic()
            await call(self._stub.PlayGroup, self._request(ordinal, load), timeout_s=60)
            await ended[ordinal].wait()

        async def read() -> None:
            cursor = await self._log.last_id(Stream.ROLLOUTS) or "0"
            while len(taken) < num_groups * load.group:
                for entry in await self._log.read(Stream.ROLLOUTS, after=cursor, block_s=1):
                    cursor, rollout = entry.id, decode_rollout(entry.d)
                    if rollout.status is not RolloutStatus.OK or rollout.samples[0].loss_mask.sum() != load.tokens:
                        raise RuntimeError(f"a rollout is not good: {rollout.status} {rollout.error}")
                    taken.append(time.monotonic() - began[rollout.ordinal])
                    left[rollout.ordinal] -= 1
                    if not left[rollout.ordinal]:
                        ended[rollout.ordinal].set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            await asyncio.sleep(POLL_S)  # the cursor is taken
            tasks.create_task(keep_in_flight(num_groups, load.in_flight // load.group, play_group))
        return taken

    def _request(self, ordinal: int, load: Load) -> play_pb2.PlayGroupRequest:
        return play_pb2.PlayGroupRequest(
            run_uid=self._log.uid,
            purpose=rollout_pb2.PURPOSE_TRAIN,
            ordinal=ordinal,
            members=list(range(load.group)),
            group_size=load.group,
            env=self._spec,
            task_index=ordinal % NUM_TASKS,
            base_url=f"{self._engine}/v1",
            model=MODEL,
            sampling=play_pb2.Sampling(temperature=TEMPERATURE, max_tokens=load.tokens),
            rollout_timeout_seconds=TURN_S,
            epoch=1,
            generation=1,
            planned_step=1,
            tokenizer_manifest_key=self._manifest,
        )

    async def close(self) -> None:
        await self._channel.close()
        await self._redis.aclose()


class TheirsV0:
    """verifiers' server of v0, asked with its client."""

    name = "verifiers"

    def __init__(self, place: Path, pids: Sequence[int], engine: str) -> None:
        self.pids = pids
        self._place, self._engine = place, engine

    async def open(self) -> None:
        """Wait until a rollout comes back: it answers health before its workers have loaded."""
        import verifiers as vf
        from verifiers.legacy.serve import ZMQEnvClient
        from verifiers.legacy.types import ClientConfig

        self._client = ZMQEnvClient(address=(self._place / "address").read_text())
        self._config = ClientConfig(api_base_url=f"{self._engine}/v1", api_key_var="OPENAI_API_KEY", max_retries=0)
        dataset = vf.load_environment(ENVIRONMENTS["v0"], num_train=NUM_TASKS).get_dataset()
        self._rows = [dict(row) for row in dataset]
        await self._client.wait_for_server_startup(START_S)

    async def play(self, load: Load) -> Sequence[float]:
        """Rollout by rollout."""
        taken: list[float] = []
        sampling: Any = {"temperature": TEMPERATURE, "max_tokens": load.tokens, "logprobs": True}
        sampling["extra_body"] = {"return_token_ids": True}

        async def play_one(number: int) -> None:
            began = time.monotonic()
            row: Any = self._rows[number // load.group % len(self._rows)]
            output = await self._client.run_rollout(row, self._config, MODEL, sampling, 0, ["trajectory"])
            taken.append(time.monotonic() - began)
            [step] = output["trajectory"]  # type: ignore[typeddict-item] - a column that was asked for
            if output["error"] is not None or len(step["tokens"]["completion_ids"]) != load.tokens:
                raise RuntimeError(f"a rollout is not good: {output['error']}")

        await keep_in_flight(load.rollouts, load.in_flight, play_one)
        return taken

    async def close(self) -> None:
        await self._client.close()


class TheirsV1:
    """verifiers' pool of v1, asked with its client."""

    name = "verifiers"

    def __init__(self, place: Path, pids: Sequence[int], engine: str, tokenizer: Path) -> None:
        self.pids = pids
        self._place, self._engine, self._tokenizer = place, engine, tokenizer

    async def open(self) -> None:
        """Load the tasks, which the caller sends with every request."""
        import verifiers.v1 as vf
        from verifiers.v1.serve import EnvClient

        self._client = EnvClient((self._place / "address").read_text())
        self._config = vf.TrainClientConfig.model_validate(
            {
                "base_url": f"{self._engine}/v1",
                "api_key_var": "OPENAI_API_KEY",
                "renderer_model_name": str(self._tokenizer),
                "renderer": {"name": "default"},
            }
        )
        taskset: Any = vf.load_taskset(vf.resolve_env_config(v1_config()).taskset)
        self._tasks = [task.data.model_dump(mode="json") for task in taskset]
        await self._client.wait_for_server_startup(START_S)

    async def play(self, load: Load) -> Sequence[float]:
        """Rollout by rollout."""
        import verifiers.v1 as vf

        taken: list[float] = []
        sampling = vf.SamplingConfig(temperature=TEMPERATURE, max_tokens=load.tokens)

        async def play_one(number: int) -> None:
            began = time.monotonic()
            task = self._tasks[number // load.group % len(self._tasks)]
            episode = await self._client.run(self._config, MODEL, sampling, task)
            taken.append(time.monotonic() - began)
            [trace] = episode.traces
            if not episode.ok or sum(trace.branches[0].sampled_mask) != load.tokens:
                raise RuntimeError(f"a rollout is not good: {[*episode.errors, *trace.errors]}")

        await keep_in_flight(load.rollouts, load.in_flight, play_one)
        return taken

    async def close(self) -> None:
        await self._client.close()


async def measure_turn(contender: Contender, load: Load) -> Turn:
    """One turn of a contender."""

    def server_cpu_s() -> float:
        return sum(sum(cpu_by_process(pid).values()) for pid in contender.pids)

    server_before, caller_before, began = server_cpu_s(), time.process_time(), time.monotonic()
    async with asyncio.timeout(TURN_S):
        taken = await contender.play(load)
    wall_s = time.monotonic() - began
    return Turn(
        rollouts_per_s=len(taken) / wall_s,
        p50_s=quantile(taken, 0.5),
        p99_s=quantile(taken, 0.99),
        server_cpu_ms=(server_cpu_s() - server_before) * 1000 / len(taken),
        caller_cpu_ms=(time.process_time() - caller_before) * 1000 / len(taken),
    )


@contextmanager
def started(words: Sequence[str], place: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A script of this directory as a process with what it starts in a session of its own, ended at the end."""
    place.mkdir(parents=True, exist_ok=True)
    with (place / "output.log").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *words], env=env, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def wait_address(place: Path, process: subprocess.Popen[bytes]) -> None:
    """Return when the server has said where it listens."""
    ends = time.monotonic() + START_S
    while not (place / "address").is_file() or not (place / "address").read_text():
        if process.poll() is not None or time.monotonic() > ends:
            raise RuntimeError(f"a server does not start:\n{(place / 'output.log').read_text()[-2000:]}")
        time.sleep(POLL_S)


async def measure_cell(
    api: str, num_workers: int, place: Path, engine: str, tokenizer: Path, load: Load, rounds: int
) -> dict[str, list[Turn]]:
    """Both servers of one cell, in turns; by name."""
    env = _environ(place.parent)
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis(place / "redis"))
        hosts = {}
        for kind, more in (("ours", ["--redis", redis.url]), (api, [])):
            words = [str(HERE / "env_server_hosts.py"), kind, str(place / kind), "--workers", str(num_workers), *more]
            hosts[kind] = stack.enter_context(started(words, place / kind, env))
        for kind, process in hosts.items():
            wait_address(place / kind, process)
        assert redis.pid is not None
        ours = Ours(api, place / "ours", [hosts["ours"].pid, redis.pid], redis.url, engine, tokenizer)
        theirs = (
            TheirsV0(place / api, [hosts[api].pid], engine)
            if api == "v0"
            else TheirsV1(place / api, [hosts[api].pid], engine, tokenizer)
        )
        found: dict[str, list[Turn]] = {ours.name: [], theirs.name: []}
        small = Load(rollouts=WARM_UP * num_workers, in_flight=WARM_UP, group=load.group, tokens=load.tokens)
        for contender in (ours, theirs):
            await contender.open()
            await measure_turn(contender, small)
        for number in range(rounds):
            for contender in (ours, theirs):
                turn = await measure_turn(contender, load)
                found[contender.name].append(turn)
                progress(f"{api}, {num_workers} workers, round {number + 1}, {contender.name}: {turn}")
        await ours.close()
        await theirs.close()
    return found


def render(cells: dict[tuple[str, int], dict[str, list[Turn]]]) -> str:
    """Medians of the turns, and their ratios."""
    rows = []
    for (api, num_workers), found in cells.items():
        medians = {
            name: {
                field: statistics.median(getattr(turn, field) for turn in turns)
                for field in ("rollouts_per_s", "p50_s", "p99_s", "server_cpu_ms", "caller_cpu_ms")
            }
            for name, turns in found.items()
        }
        for name, values in medians.items():
            rows.append(
                [
                    f"{api}, {num_workers} worker{'s' * (num_workers > 1)}, {name}",
                    f"{values['rollouts_per_s']:.0f}",
                    f"{values['p50_s']:.2f}",
                    f"{values['p99_s']:.2f}",
                    f"{values['server_cpu_ms']:.2f}",
                    f"{values['caller_cpu_ms']:.2f}",
                ]
            )
        ours, theirs = medians["Millrace"], medians["verifiers"]
        ratios = [f"{ours['rollouts_per_s'] / theirs['rollouts_per_s']:.2f} ×"]
        ratios += [f"1/{theirs[f] / ours[f]:.1f}" for f in ("p50_s", "p99_s", "server_cpu_ms", "caller_cpu_ms")]
        rows.append(["… ours to theirs", *ratios])
    return table(["", "rollouts/s", "p50, s", "p99, s", "server, CPU ms", "caller, CPU ms"], rows)


def render_turns(cells: dict[tuple[str, int], dict[str, list[Turn]]]) -> str:
    """Every turn, in the order in which they were taken."""
    rows = []
    for (api, num_workers), found in cells.items():
        for pair in zip(*found.values(), strict=True):
            for name, turn in zip(found, pair, strict=True):
                cpu = f"{turn.server_cpu_ms:.2f}"
                rows.append([f"{api}, {num_workers}, {name}", f"{turn.rollouts_per_s:.0f}", f"{turn.p99_s:.2f}", cpu])
    return table(["turn", "rollouts/s", "p99, s", "server, CPU ms"], rows)


def _environ(directory: Path) -> dict[str, str]:
    """Of every process: one thread, the environments on the path, no variable of a deployment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    paths = [str(directory), str(TASKSETS), str(REPOSITORY / "services")]
    return {"OMP_NUM_THREADS": "1", "OPENAI_API_KEY": "EMPTY", **kept, "PYTHONPATH": os.pathsep.join(paths)}


async def measure(options: argparse.Namespace) -> str:
    """The report as Markdown."""
    with tempfile.TemporaryDirectory(prefix="millrace-env-server-") as directory, ExitStack() as stack:
        place = Path(directory)
        (place / f"{HARNESS}.py").write_text(HARNESS_SOURCE)
        sys.path[:0] = [directory, str(TASKSETS)]
        os.environ.setdefault("OPENAI_API_KEY", "EMPTY")
        progress("tokenizer")
        Workplace(place).make_model(seed=0)
        tokenizer = place / "outputs" / "reverse-text" / "base"
        [port] = free_ports(1)
        words = [str(HERE / "scripted_engine.py"), "--port", str(port), "--tokens", str(options.tokens)]
        words += ["--whole"] if options.whole else []
        stack.enter_context(started(words, place / "engine", _environ(place)))
        cells = {}
        for api in options.apis:
            rollouts = options.rollouts if api == "v0" else options.rollouts_v1
            load = Load(rollouts=rollouts, in_flight=options.in_flight, group=options.group, tokens=options.tokens)
            for num_workers in options.workers:
                cell = place / f"{api}-{num_workers}"
                progress(f"{api}, {num_workers} workers: the servers start")
                cells[api, num_workers] = await measure_cell(
                    api, num_workers, cell, f"http://127.0.0.1:{port}", tokenizer, load, options.rounds
                )
    what = f"{options.in_flight} rollouts in flight, {options.tokens} tokens, groups of {options.group}"
    how = "one request per rollout" if options.whole else "choices one by one"
    title = f"## The env-server against verifiers' own: {what}; medians of {options.rounds}, engine: {how}"
    return f"{title}\n\n{machine()}\n\n{render(cells)}\n\n{render_turns(cells)}\n"


def main() -> None:
    end_like_interrupt()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--in-flight", type=int, default=512)
    parser.add_argument("--rollouts", type=int, default=4096, help="of a turn, v0")
    parser.add_argument("--rollouts-v1", type=int, default=1536, help="of a turn, v1")
    parser.add_argument("--apis", nargs="+", choices=("v0", "v1"), default=["v0", "v1"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--whole", action="store_true", help="the engine sends no choices one by one")
    parser.add_argument("--quick", action="store_true", help="one round of 256 rollouts, 64 in flight, one worker")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.in_flight, options.workers = 1, 64, [1]
        options.rollouts = options.rollouts_v1 = 256
    print(asyncio.run(measure(options)))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
