"""How long a real vLLM stands still, and its clients wait for a token, when new weights come.

One replica, started by the launcher as in production; one client streams a completion all the time. Each round brings,
one after the other, a new run's first version, which is a full reload (fetch, vLLM's own loader, proof; what is in
flight ends), a delta, and a full copy. Before the rounds, as a replica that serves a run refuses it: a file on disk by
`POST /update_weights` (pause, have vLLM read and load a safetensors file, resume), which is how systems without deltas
do it and proves nothing; and pauses in which nothing is done.

* `standstill`, of the replica's own clock: from the order to pause, which waits for the step that runs, until vLLM goes
  on. Of a full reload: until it is proved, as nothing is served before.
* `held`: from the same moment until the version is proved. So long requests wait at the gate and answers are kept back.
* `without a token`: the longest time between two tokens at the client while the update lasts (fetch and preparation
  included, which take processors from the engine where these are few), less the usual time between two.
"""

import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from report import REPOSITORY, progress, table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from weight_sync_latency import DENSITY, Model, median

from millrace.config.sections.trainer import PolicyConfig
from millrace.errors import UnavailableError
from millrace.inference.embedded import loader
from millrace.inference.embedded import loader as weights
from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.internal.v1 import policy_service_pb2_grpc
from millrace.internal.v1.policy_pb2 import PolicyEntry
from millrace.local.redis import free_port
from millrace.policies.manifest import Probe
from millrace.policies.publish import upload_files, whole_parts
from millrace.policies.tensors import TensorBytes, pack_safetensors
from millrace.rpc.channel import call, open_channel
from millrace.runlog.names import Names
from millrace.storage.local import LocalStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.publish.commit import Committer, VersionInput
from millrace.trainer.publish.plan import PublishTarget

PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"
FLAGS = {"enforce_eager": True, "max_model_len": 4096, "max_num_seqs": 8, "kv_cache_memory_bytes": 512 << 20}
START_S, CALL_S = 400.0, 120.0  # 25 s on a quiet machine
PROMPT = [1, 2, 3]
SETTLED_TOKENS = 20  # tokens on either side of an update, by which the usual time between two is known
DELTA, FULL = "delta, proved", "full copy in place, proved"
RELOAD, FILE, EMPTY = "full reload: load and prove", "file on disk, unproved", "empty pause"
APPLIED, LOADED = "policy applied and proved", "weights of a directory loaded"
PARTS = {"pause_s": "pause", "write_s": "write", "switch_s": "switch", "resume_s": "resume", "probe_s": "probe"}
GOAL = 0.1


class Versions:
    """The versions of one model, published as deltas or as full copies, with a probe."""

    def __init__(self, place: Path, model: Model) -> None:
        _tokenizer(model.config.vocab_size).save_pretrained(model.directory)
        self._files = {path.name: path.read_bytes() for path in model.directory.iterdir() if path.suffix == ".json"}
        self._store = LocalStore(place / "store")
        self._model = model
        self.tensors: list[tuple[str, TensorBytes]] = model.published()
        (model.directory / "model.safetensors").write_bytes(pack_safetensors(self.tensors)[0])
        self._twin = loader.load_model(model.directory, dict(self.tensors))

    def committer(self, uid: str, *, delta: bool) -> Committer:
        """Of a new run."""
        return Committer(
            PublishTarget(store=self._store, names=Names("benchmark", uid), gang=Gang(), epoch=1),
            config=PolicyConfig(delta=delta),
            lineage=0,
            files=upload_files(self._store, prefix="benchmark", uid=uid, epoch=1, files=self._files),
        )

    def next(self, committer: Committer, version: int) -> PolicyEntry:
        """Trains a step and publishes it."""
        self._model.train()
        self.tensors = self._model.published()
        weights.copy_tensors(self._twin, dict(self.tensors))
        token_ids = tuple((7919 * index + 13) % self._model.config.vocab_size for index in range(16))
        probe = Probe(token_ids=token_ids, logprobs=tuple(weights.prompt_logprobs(self._twin, token_ids)))
        given = VersionInput(version=version, parts=whole_parts(self.tensors), probe=probe)
        published = committer.commit(given).published
        assert published is not None
        return PolicyEntry(
            lineage=0,
            version=version,
            manifest_key=published.manifest_key,
            manifest_sha256=published.manifest_sha256,
            digest=published.manifest.digest,
        )


class Client:
    """A stream of tokens that never ends, and updates beside it."""

    def __init__(self, session: aiohttp.ClientSession, stub: policy_service_pb2_grpc.PolicyServiceStub) -> None:
        self._session, self._stub = session, stub
        self._arrived: list[float] = []
        self._came = asyncio.Event()
        self._failures = 0

    async def stream(self) -> None:
        """Keeps one completion in flight; ends by cancellation."""
        body = {"model": "policy", "prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        while True:
            try:
                async with self._session.post("/v1/completions", json=body) as response:
                    response.raise_for_status()  # also a server that is still starting, or replaces its model
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            self._arrived.append(time.perf_counter())
                            self._came.set()
            except aiohttp.ClientError:  # no server yet, or a model was replaced and its requests ended
                self._failures += 1
                await asyncio.sleep(0.05)

    async def serve(self, uid: str, entry: PolicyEntry) -> pb.PolicyStatus:
        """Updates the replica, also one that is still starting."""
        request = pb.UpdatePolicyRequest(run_uid=uid, policy=entry, epoch=1, wait_seconds=10)
        ends = time.monotonic() + START_S
        while time.monotonic() < ends:
            with contextlib.suppress(UnavailableError):
                status = (await call(self._stub.UpdatePolicy, request, timeout_s=CALL_S)).status
                if status.state == pb.POLICY_STATE_SERVING and status.version == entry.version:
                    return status
                if status.state in (pb.POLICY_STATE_UPDATE_FAILED, pb.POLICY_STATE_BROKEN):
                    raise RuntimeError(status.error)
            await asyncio.sleep(0.1)
        raise TimeoutError(f"version {entry.version} does not serve after {START_S:.0f} s")

    async def pause(self) -> float:
        """Pauses and resumes, with nothing in between; seconds until it goes on."""
        began = time.perf_counter()
        await call(self._stub.PauseGeneration, pb.PauseGenerationRequest(), timeout_s=CALL_S)
        await call(self._stub.ResumeGeneration, pb.ResumeGenerationRequest(), timeout_s=CALL_S)
        return time.perf_counter() - began

    async def load_file(self, directory: Path) -> None:
        """PRIME-RL's way."""
        async with self._session.post("/update_weights", json={"weight_dir": str(directory)}) as response:
            response.raise_for_status()

    async def tokens(self, count: int, *, within_s: float = CALL_S) -> None:
        """Returns when so many more tokens have come."""
        async with asyncio.timeout(within_s):
            until = len(self._arrived) + count
            while len(self._arrived) < until:
                self._came.clear()
                await self._came.wait()

    async def pause_of(self, update: asyncio.Task[object]) -> float:
        """Seconds that the update took from the stream of tokens."""
        first, failures = len(self._arrived) - 1, self._failures
        await update
        await self.tokens(SETTLED_TOKENS)
        if self._failures > failures:
            raise RuntimeError("the update ended the stream")
        gaps = [b - a for a, b in zip(self._arrived[first:], self._arrived[first + 1 :], strict=False)]
        pause = max(gaps) - statistics.median(gaps)
        progress(f"vLLM: {pause:.3f} s without a token")
        return pause


@dataclass(slots=True)
class Measured:
    """Seconds, by kind of update; `parts` are those of the deltas, as the replica logs them."""

    standstill: dict[str, list[float]] = field(default_factory=dict)
    held: dict[str, list[float]] = field(default_factory=dict)
    silent: dict[str, list[float]] = field(default_factory=dict)
    update: dict[str, list[float]] = field(default_factory=dict)
    parts: dict[str, list[float]] = field(default_factory=dict)

    def note(self, name: str, **seconds: float) -> None:
        """Adds one update's."""
        for kind, value in seconds.items():
            getattr(self, kind).setdefault(name, []).append(value)


def vllm_report(*, quick: bool, versions: int) -> str:
    """The tables as Markdown."""
    with tempfile.TemporaryDirectory(prefix="weight-sync-vllm-") as directory:
        place = Path(directory)
        model = Model(place / "model", quick=quick)
        found = asyncio.run(_measure(place, model, versions))
    columns = (found.standstill, found.held, found.silent, found.update)
    rows = [[name, *(_cell(column.get(name, [])) for column in columns)] for name in (DELTA, FULL, RELOAD, FILE, EMPTY)]
    parts = [PARTS[name] for name in PARTS if name in found.parts]
    return "\n\n".join(
        [
            "## Publish to serving, engine: vllm",
            f"{model.num_parameters:,} parameters in bf16, {100 * DENSITY:g} % of the weights change per version, real "
            f"vLLM on CPU, load average {os.getloadavg()[0]:.0f}. Seconds, medians of {versions} (and the slowest); "
            "what each column means stands in `benchmarks/weight_sync_vllm.py`.",
            table(["update", "standstill", "held", "without a token", "update in all"], rows),
            "A delta's time in parts:",
            table(["", *parts, "prepare, before"], [["delta", *map(_cell, found.parts.values())]]),
            _goal(found),
        ]
    )


def _cell(seconds: Sequence[float]) -> str:
    return f"{median(seconds)} ({max(seconds):.3f})" if seconds else "-"


def _goal(found: Measured) -> str:
    """A delta's pause against each full reload's, in both meanings of the word."""
    rows = []
    for name in (RELOAD, FULL, FILE):
        whole = statistics.median(found.standstill[name])
        row: list[object] = [name, f"{whole:.3f}"]
        for times in (found.standstill, found.held):
            share = statistics.median(times[DELTA]) / whole
            row.append(f"{100 * share:.1f} % ({'met' if share <= GOAL else 'MISSED'})")
        rows.append(row)
    header = ["full reload", "its standstill", "a delta's standstill of it", "a delta's held time of it"]
    return table(header, rows)


async def _measure(place: Path, model: Model, count: int) -> Measured:
    found = Measured()
    async with _replica(place, Versions(place, model)) as (client, versions):
        await client.tokens(1, within_s=START_S)
        for number in range(count):
            progress(f"vLLM: {FILE} and {EMPTY}, {number + 1} of {count}")
            await client.tokens(SETTLED_TOKENS)
            silent = await client.pause_of(asyncio.create_task(client.load_file(place / "model")))
            found.note(FILE, silent=silent, standstill=_last(place, LOADED)["standstill_s"])
            found.note(EMPTY, standstill=await client.pause())
        for number in range(count):
            uid = f"run{number}"
            progress(f"vLLM: {RELOAD}, {number + 1} of {count}")
            committer = versions.committer(uid, delta=True)
            status = await client.serve(uid, versions.next(committer, 0))
            found.note(RELOAD, standstill=status.pause_seconds, update=status.update_seconds)
            for version, name in ((1, DELTA), (2, FULL)):
                progress(f"vLLM: {name}, {number + 1} of {count}")
                if name == FULL:
                    committer = versions.committer(uid, delta=False)
                entry = versions.next(committer, version)
                await client.tokens(SETTLED_TOKENS)
                updating = asyncio.create_task(client.serve(uid, entry))
                silent = await client.pause_of(updating)
                said = _last(place, APPLIED)
                found.note(name, silent=silent, standstill=said["standstill_s"], held=said["held_s"])
                found.note(name, update=updating.result().update_seconds)
                if name == DELTA:
                    for part in (*PARTS, "prepare_s"):
                        found.note(part, parts=said[part])
    return found


def _last(place: Path, message: str) -> dict[str, Any]:
    """The replica's last log line of that kind."""
    for line in reversed((place / "replica.log").read_text().splitlines()):
        with contextlib.suppress(json.JSONDecodeError):
            fields = json.loads(line)
            if isinstance(fields, dict) and fields.get("msg") == message:
                return fields
    raise RuntimeError(f"the replica did not log {message!r}")


@contextlib.asynccontextmanager
async def _replica(place: Path, versions: Versions) -> AsyncIterator[tuple[Client, Versions]]:
    """A replica of the model, and a client of it that streams."""
    grpc, http = (f"127.0.0.1:{free_port()}" for _ in range(2))
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "VLLM_", "OMP_"))}
    environ |= {
        "MILLRACE_ENGINE": "vllm",
        "MILLRACE_VLLM_PYTHON": str(PYTHON),
        "MILLRACE_VLLM_FLAGS": json.dumps(FLAGS),
        "MILLRACE_MODEL": str(place / "model"),
        "MILLRACE_LISTEN": grpc,
        "MILLRACE_HTTP_LISTEN": http,
        "MILLRACE_STORE_URL": f"file://{place}/store",
        "MILLRACE_DRAIN_S": "0",
        "MILLRACE_LOG_JSON": "1",
    }
    with (place / "replica.log").open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "millrace.inference.main", env=environ, stdout=sink, stderr=asyncio.subprocess.STDOUT
        )
    try:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=CALL_S)
        async with aiohttp.ClientSession(f"http://{http}", timeout=timeout) as session, open_channel(grpc) as channel:
            client = Client(session, policy_service_pb2_grpc.PolicyServiceStub(channel))
            streaming = asyncio.create_task(client.stream())
            try:
                yield client, versions
            except BaseException:  # shows the log, then raises
                print((place / "replica.log").read_text()[-4000:], file=sys.stderr)
                raise
            finally:
                streaming.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(CALL_S):
            await process.wait()


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Bytes, and words that nothing is written in, up to the vocabulary's size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "<end>", *(f"w{number}" for number in range(vocabulary - len(alphabet) - 1))]
    core = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
