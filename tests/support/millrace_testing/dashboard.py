"""Runs as the store holds them, with what models may have written, and a dashboard over them."""

import asyncio
import contextlib
import hashlib
import http.client
import json
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.readers.beside import dashboard_server
from millrace.readers.dashboard.reading import ReaderClient
from millrace.rollouts.batch_wire import pack_batch
from millrace.rollouts.token_log import LoggedSample, TokenLog
from millrace.rollouts.types import PolicySpan, Purpose, Rollout, RolloutError, RolloutStatus, Sample, TrainSample
from millrace.rollouts.wire import encode_archive
from millrace.rpc.access import ServerAccess
from millrace.runlog.event_archive import encode_archive as encode_events
from millrace.runlog.names import Names
from millrace.runlog.records.frontier import chain_hash
from millrace.runlog.records.token_logs import store_token_log
from millrace.runlog.redis.entry import Entry
from millrace.storage.local import LocalStore
from millrace.v1 import audit_pb2, event_pb2, run_pb2

UID = "01a205f04e00c6b2d345401dca64"
NAMES = Names("millrace", UID)
RUN = "letters-1"
START = 1_700_000_000
SECRET = "mrt_0123456789abcdef0123"
HOSTILE = (
    "<script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 1">',
    "\u202ereversed\u202c \x00\x1b[31mred\x07 \ufeff",
    "javascript:window.hacked=1 </textarea></script><!--",
    "x" * 60_000,  # a rollout's messages have 64 KiB at most: `rollouts/wire.py` refuses longer ones
    "{{constructor.constructor('window.hacked=1')()}} ${window.hacked=1}",
    f"the key is {SECRET} and password=hunter2hunter2",
    "\u0000\ud7ff\ue000\U0010ffff",
)
"""Completions that a page must show and not obey."""


def _column(prompt: int, sampled: int) -> np.ndarray:
    return np.array([0] * prompt + [1] * sampled, np.uint8)


@dataclass(kw_only=True)
class RunWriter:
    """Writes the log of a run into a store: a group per step, each member with another reward."""

    store: LocalStore
    names: Names = NAMES
    members: int = 4
    env: str = "letters"
    env_seconds: float = 0.5
    model_seconds: float = 1.5
    told: int = 0
    clock: float = START
    publish_s: float = 0.1
    update_s: float = 0.1
    trainer_s: float = 1.0
    wait_s: float = 2.0
    commit_s: float = 0.05
    held_up: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step by the metric that says that the trainer stood still for them."""

    def step(self, step: int, completions: Sequence[str] = ()) -> None:
        """Commit a step with its events."""
        self.commit(step, completions)
        self.events(step)

    def commit(self, step: int, completions: Sequence[str] = (), more: Sequence[Rollout] = ()) -> None:
        """Commit header, data and archive of a step, with `more` in the archive; the last member has failed."""
        count = self.members
        rollouts = [self.rollout(step, member, completions) for member in range(count)]
        samples = [sample for member in range(count - 1) for sample in self.train_samples(step, member)]
        header = batch_pb2.BatchHeader(
            run_uid=self.names.uid, kind=batch_pb2.BATCH_KIND_TRAIN, step=step, previous_chain_hash=bytes(32)
        )
        header.num_rollouts, header.reward_mean = count - 1, 0.5
        for index, chunk in enumerate(pack_batch(header, samples)):
            header.chunks[index].key = f"{self.names.batch_data(step, 1, 'n')}chunk-{index:05d}.pb"
            self.store.put(header.chunks[index].key, chunk)
        header.resolutions.add(
            ordinal=step, env=self.env, task_id=f"id-{step}", outcome=batch_pb2.ORDINAL_OUTCOME_TRAINED, attempts=1
        )
        header.rollouts_key = f"{self.names.rollout_data(step, 1, 'n')}rollouts.pb.zst"
        archive = encode_archive([*rollouts, *more])
        self.store.put(header.rollouts_key, archive)
        header.rollouts_sha256 = hashlib.sha256(archive).digest()
        self.store.create(self.names.batch_header(step), header.SerializeToString())

    def token_log(self, step: int, *, members: Sequence[int], difference: float = 0.25, chain: bytes = b"") -> None:
        """Store a step's token log: the engine's log-probs plus a difference that grows with every token."""
        header = self.store.get(self.names.batch_header(step))
        samples = []
        for member in members:
            column = _column(2, 2 + member)
            count = 2 + member
            samples.append(
                LoggedSample(
                    sample=member, ordinal=step, member=member, attempt=0, minibatch=0, mask=column,
                    logprobs=(-0.5 + difference * np.arange(1, count + 1)).astype(np.float32),
                    entropies=np.full(count, 1.5, np.float16),
                )
            )  # fmt: skip
        log = TokenLog(
            run_uid=self.names.uid, step=step, lineage=0, chain_hash=chain or chain_hash(bytes(32), header),
            num_rollouts=self.members - 1, share=0.25, samples=tuple(samples),
        )  # fmt: skip
        store_token_log(self.store, self.names, log)

    def rollout(self, step: int, member: int, completions: Sequence[str]) -> Rollout:
        """Return one play."""
        said = completions[member % len(completions)] if completions else f"answer {step}.{member}"
        messages = [{"role": "user", "content": f"task {step}"}, {"role": "assistant", "content": said}]
        finished = self.clock + step * (self.wait_s + self.trainer_s) + self.wait_s - self.commit_s
        common: dict[str, Any] = {
            "run_uid": self.names.uid, "purpose": Purpose.TRAIN, "ordinal": step, "member": member, "attempt": 0,
            "group_size": self.members, "env": self.env, "task_index": step, "task_id": f"id-{step}",
            "messages_json": json.dumps(messages), "num_turns": 1, "env_server": "env-server-1",
            "task_json": '{"answer": "the answer"}',
            "seconds": self.model_seconds + self.env_seconds, "model_seconds": self.model_seconds,
            "entry_id": f"{round(finished * 1000)}-{member}", "stop_condition": "done",
        }  # fmt: skip
        if member == self.members - 1:
            error = RolloutError(type="ToolError", message=HOSTILE[0])
            return Rollout(**common, status=RolloutStatus.ENV_ERROR, error=error)
        column = _column(2, 2 + member)
        sample = Sample(
            token_ids=np.arange(len(column), dtype=np.int32),
            loss_mask=column,
            inference_logprobs=-column.astype(np.float32) * 0.5,
            policy_spans=(PolicySpan(lineage=0, version=max(0, step - 1), start=2, end=len(column)),),
        )
        return Rollout(**common, status=RolloutStatus.OK, samples=(sample,), reward=member / 2, metrics={"share": 0.5})

    def evaluated(self, version: int, member: int = 0, *, task: int = 0) -> Rollout:
        """Return one play of an evaluation of a version."""
        played = replace(self.rollout(version, member, ()), purpose=Purpose.EVAL, eval_id=f"{self.env}@{version}-e1")
        return replace(played, ordinal=task, task_index=task, group_size=self.members - 1)

    def train_samples(self, step: int, member: int) -> list[TrainSample]:
        """Return what is trained on of a play: of each of its sequences that has something sampled."""
        return [self.train_sample(step, member)]

    def train_sample(self, step: int, member: int) -> TrainSample:
        """Return what is trained on of a play's only sequence."""
        column, version = _column(2, 2 + member), max(0, step - 1)
        return TrainSample(
            token_ids=np.arange(len(column), dtype=np.int32), loss_mask=column,
            inference_logprobs=-column.astype(np.float32) * 0.5,
            advantages=column.astype(np.float32) * (member - 1), ordinal=step, member=member, attempt=0,
            env=self.env, reward=member / 2, temperature=1.0, min_version=version, max_version=version, lineage=0,
        )  # fmt: skip

    def events(self, step: int) -> None:
        """Write a step's events."""
        at = self.clock + (step + 1) * (self.wait_s + self.trainer_s)
        done = event_pb2.StepCompleted(
            step=step, reward_mean=0.25 * step, num_tokens=12, num_rollouts=self.members - 1,
            step_seconds=self.wait_s + self.trainer_s, wait_seconds=self.wait_s,
            metrics={
                "loss/mean": 0.5 / (step + 1),
                "time/forward_backward": self.trainer_s - sum(self.held_up.values()),
                **self.held_up,
            },
        )  # fmt: skip
        published = event_pb2.PolicyPublished(version=step + 1, size_bytes=100, seconds=self.publish_s, codec="full")
        served = event_pb2.PolicyServed(
            replica="inference-1", version=step + 1, pause_seconds=0.05, update_seconds=self.update_s
        )
        self.archive(
            (at - self.trainer_s, event_pb2.Event(batch_committed=event_pb2.BatchCommitted(step=step, num_trained=1))),
            (at, event_pb2.Event(step_completed=done)),
            (at + self.publish_s, event_pb2.Event(policy_published=published)),
            (at + self.publish_s + self.update_s, event_pb2.Event(policy_served=served)),
        )

    def archive(self, *events: tuple[float, event_pb2.Event]) -> None:
        """Archive events as one object."""
        entries, first = [], self.told
        for number, (at, event) in enumerate(events, start=first):
            event.writer, event.writer_sequence = "trainer-0", number + 1
            event.time.FromNanoseconds(round(at * 1e9))
            data = event.SerializeToString()
            entries.append(Entry(id=f"1-{number}", v=1, h=hashlib.sha256(data).hexdigest(), d=data, tp=""))
        self.told = first + len(events)
        self.store.create(self.names.archived_events(entries[0].id, entries[-1].id), encode_events(entries))


@dataclass
class KnownRuns:
    """A source of runs that are just said to be there."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    done: list[tuple[str, str, str]] = field(default_factory=list)
    words: str = ""
    waits: list[dict[str, Any]] = field(default_factory=list)
    chain: list[dict[str, Any]] = field(default_factory=list)

    def seen_by(self, tenant: str) -> "KnownRuns":
        return replace(self, runs=[run for run in self.runs if tenant in ("", run.get("tenant", ""))])

    def list_runs(self, *, config: str = "") -> list[dict[str, Any]]:
        return [run for run in self.runs if config in f"model.name={run['name']}"]

    async def find_run(self, name: str) -> dict[str, Any]:
        key = {"key": "model.name", "value": "m", "default": None, "differs": True}
        secret = {"key": "orchestrator.client.api_key", "value": SECRET, "default": None, "differs": True}
        args = {"key": "orchestrator.env[0].args", "value": {"api_key": "sk-abcdefgh12345"}, "default": None}
        return self._find(name) | {"config": [key, secret, args | {"differs": True}], "run_hash": "f" * 64}

    def uid_of(self, name: str) -> str:
        return str(self._find(name)["uid"])

    async def checkpoints(self, name: str) -> list[dict[str, Any]]:
        return [{"step": 2, "uri": "file:///c/2", "size_bytes": 5, "time": START}]

    def explain(self, name: str) -> dict[str, Any]:
        return {"summary": "trainer <- orchestrator", "chain": self.chain, "waits": self.waits}

    async def act(self, name: str, action: str, *, reason: str) -> None:
        self.done.append((name, action, reason))

    async def audit(self, name: str) -> audit_pb2.AuditReport:
        message = f"{HOSTILE[0]} of {self._find(name)['name']}"
        return audit_pb2.AuditReport(
            num_steps=6,
            dropped={"STALE": 2},
            violations=[audit_pb2.AuditFinding(check="CHAIN_BROKEN", message=message)],
            notes=[audit_pb2.AuditFinding(check="NOTE", message=message)],
        )

    def trouble(self) -> str:
        return self.words

    def _find(self, name: str) -> dict[str, Any]:
        found = next((run for run in self.runs if name in (run["name"], run["uid"])), None)
        if found is None:
            raise NotFoundError(f"no run {name!r} is known", reason="RUN_NOT_FOUND")
        return found


def known_run(name: str = RUN, uid: str = UID, *, state: str = "RUNNING", **more: Any) -> dict[str, Any]:
    """Return a run in the shape of `RunSource`."""
    assert f"RUN_STATE_{state}" in run_pb2.RunState.keys()  # noqa: SIM118 - a wrapper, which is no mapping
    return {
        "name": name, "uid": uid, "kind": "RL", "state": state, "error": None, "created": START, "started": START,
        "ended": None, "labels": {}, "parent": None, "step": 3, "max_steps": 10, "version": 3,
        "inference_version": 3, "reward": 0.5, "rollouts": 9, "tokens": 100, "groups": 3, "groups_dropped": 0,
        "environments": [], "held_by": ["trainer-0"], "workers": [], "queue_place": "",
        "has_ended": state in ("SUCCEEDED", "FAILED", "CANCELLED"),
    } | more  # fmt: skip


@dataclass
class Served:
    """A dashboard that is being served."""

    port: int
    source: KnownRuns

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, path: str, *, method: str = "GET", body: Any = None, host: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Return the status, headers and body; blocking. `headers` have `_` for `-`; an own `Host` replaces the
        usual one.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = None if body is None else json.dumps(body).encode() if not isinstance(body, bytes) else body
        try:
            connection.putrequest(method, path, skip_host=True)
            connection.putheader("Host", host if host is not None else f"127.0.0.1:{self.port}")
            if data is not None:
                connection.putheader("Content-Length", str(len(data)))
                headers.setdefault("Content_Type", "application/json")
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders(data)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def json(self, path: str, **options: Any) -> tuple[int, Any]:
        """Return the status and document."""
        status, _, body = self.ask(path, **options)
        return status, json.loads(body)


def opened(page: Any, path: str, wanted: str) -> Any:
    """Open a path in a browser and return the page once it shows `wanted`.

    Assert that no text from a model was executed.
    """
    page.goto(page.base + path)
    page.wait_for_selector(wanted)
    assert page.evaluate("window.hacked") is None
    return page


@contextlib.asynccontextmanager
async def serving(
    store: LocalStore, directory: Path, *, access: ServerAccess | None = None, source: KnownRuns | None = None
) -> AsyncIterator[Served]:
    """Serve a dashboard over a store, with a reader of its own."""
    source = source or KnownRuns([known_run()])
    reader = ReaderClient(store_url=store.uri("").rstrip("/"), prefix="millrace", directory=directory)
    try:
        async with dashboard_server("127.0.0.1:0", source, reader, access=access or ServerAccess()) as port:
            yield Served(port, source)
    finally:
        await reader.close()


class ServedInThread:
    """`serving` in an event loop of another thread, for tests that block."""

    def __init__(self, store: LocalStore, directory: Path, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._context = serving(store, directory, **options)
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Served:
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._context.__aenter__(), self._loop).result(60)

    def __exit__(self, *exc_info: object) -> None:
        asyncio.run_coroutine_threadsafe(self._context.__aexit__(None, None, None), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
