"""A real env-server (gRPC, worker processes, Redis) against a small fake engine over HTTP."""

import asyncio
import json
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web

from millrace.env_server.isolation.inherited import teacher_key_problem
from millrace.env_server.service import Admits, EnvService
from millrace.env_server.sink import RolloutSink
from millrace.env_server.spool import Spool
from millrace.env_server.teacher.scorer import Teachers
from millrace.env_server.tokenizer_files import TokenizerFiles
from millrace.env_server.workers.pool import PoolLimits
from millrace.env_server.workers.starter import WorkerStarter
from millrace.internal.v1 import env_service_pb2, env_service_pb2_grpc, play_pb2, rollout_pb2
from millrace.orchestrator.play.env_servers import PLAY_TIMEOUT_S
from millrace.policies.manifest import PolicyPlace
from millrace.policies.publish import PolicyContents, publish_policy
from millrace.policies.tensors import TensorBytes
from millrace.rollouts.types import Rollout
from millrace.rollouts.wire import decode_rollout
from millrace.rpc.channel import call, open_channel
from millrace.rpc.serve import Shutdown, serve
from millrace.runlog.names import Names, Stream
from millrace.runlog.records.revisions import has_ended
from millrace.runlog.redis.connection import open_redis
from millrace.runlog.redis.log import RunLog
from millrace.storage.local import LocalStore
from millrace_testing import thinking_template
from millrace_testing.patience import patient

FIXTURES = Path(__file__).parents[2] / "fixtures" / "environments"
IM_START, IM_END = 256, 257
LOAD_S = 240.0


@pytest.fixture(scope="session", autouse=True)
def environments_on_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Yield workers are children of this process: they inherit its PYTHONPATH."""
    before = os.environ.get("PYTHONPATH")
    paths = sorted(str(each) for each in FIXTURES.iterdir() if each.is_dir())
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([before] if before else [])])
    os.environ["FAULTY_MARKER"] = str(tmp_path_factory.mktemp("faulty") / "marker")
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    os.environ.pop("PYTHONPATH")
    if before:
        os.environ["PYTHONPATH"] = before


TAKES_SEVERAL, PYTHON, AGENT = "takes_several_traces", "python", "agent"
"""Keys of the args of `Server.open` and `play_one` that are the spec's own."""


def encode_chat(messages: list[dict[str, Any]]) -> list[int]:
    """Return ChatML over bytes, with the generation prompt: what a template and a byte-level tokenizer give."""
    ids: list[int] = []
    for message in messages:
        content = f"{message['role']}\n{message.get('content') or ''}"
        ids += [IM_START, *content.encode(), IM_END, *b"\n"]
    return [*ids, IM_START, *b"assistant\n"]


class FakeEngine:
    """An engine with canned replies. The first part of the URL is the mode, so each rollout chooses its own."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.num_open = 0
        self.url = ""
        self.busy_replies = 0
        self.generated_ids: list[int] = []

    def base_url(self, mode: str) -> str:
        return f"{self.url}/{mode}/v1"

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.num_open += 1
        try:
            return await self._chat(request, body)
        finally:
            self.num_open -= 1

    async def _chat(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        mode = request.match_info["mode"]
        if (failure := await self._failure(mode, request)) is not None:
            return failure
        reply = self._reply(mode, body["messages"])
        token_ids = [*reply.encode(), IM_END]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": reply},
            "finish_reason": "stop",
            "token_ids": token_ids,
            "logprobs": {"content": [_logprob(i, -0.5) for i in token_ids]},
            "policy_spans": _spans(len(token_ids)),
        }
        answer = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [choice],
            "prompt_token_ids": encode_chat(body["messages"]),
            "usage": {"prompt_tokens": 1, "completion_tokens": len(token_ids), "total_tokens": 1},
        }
        match mode:
            case "nologprobs":
                choice.pop("logprobs")
            case "noids":
                choice.pop("token_ids")
            case "noprompt":
                answer.pop("prompt_token_ids")
            case "nospans":
                choice.pop("policy_spans")
            case "fewlogprobs":
                choice["logprobs"]["content"].pop()
            case "empty":
                choice |= {"token_ids": [], "message": {"role": "assistant", "content": ""}}
                choice["logprobs"] = {"content": []}
            case "eos":
                choice |= {"token_ids": [IM_END], "message": {"role": "assistant", "content": ""}}
                choice["logprobs"] = {"content": [_logprob(IM_END, -0.1)]}
                choice["policy_spans"] = _spans(1)
            case "tools" | "objects" if body["messages"][-1]["role"] != "tool":
                # It asks the only tool, about the last word that was said.
                [tool] = body["tools"]
                name = str(body["messages"][-1]["content"]).split()[-1]
                arguments = {"name": name} if mode == "objects" else json.dumps({"name": name})
                function = {"name": tool["function"]["name"], "arguments": arguments}
                call = {"id": "call_0", "type": "function", "function": function}
                choice["message"] = {"role": "assistant", "content": "", "tool_calls": [call]}
                choice["finish_reason"] = "tool_calls"
            case "twochoices":
                answer["choices"] = [choice, choice]
            case "retokenized":
                # The template rewrites earlier turns: the next prompt does not extend the tokens that were sampled.
                answer["prompt_token_ids"] = [len(body["messages"]), *encode_chat(body["messages"])]
            case "keeps" | "strips":
                template = thinking_template.STRIPS if mode == "strips" else thinking_template.KEEPS
                answer["prompt_token_ids"] = thinking_template.prompt_encoder(template)(body["messages"])
                choice["token_ids"] = [*reply.encode(), *thinking_template.END.encode()]
                choice["logprobs"] = {"content": [_logprob(i, -0.5) for i in choice["token_ids"]]}
                choice["policy_spans"] = _spans(len(choice["token_ids"]))
        return web.json_response(answer)

    async def _failure(self, mode: str, request: web.Request) -> web.StreamResponse | None:
        match mode:
            case "500":
                return web.json_response({"error": {"message": "boom"}}, status=500)
            case "refused":
                return web.json_response({"error": {"message": "top_k must be positive"}}, status=400)
            case "401":
                return web.json_response({"error": {"message": "who are you"}}, status=401)
            case "toolong":
                text = "This model's maximum context length is 8 tokens. However, your prompt has 52 tokens."
                return web.json_response({"error": {"message": text}}, status=400)
            case "badjson":
                return web.Response(text="{not json", content_type="application/json")
            case "502" | "503" | "504":
                return web.json_response({"error": {"message": "shutting down"}}, status=int(mode))
            case "reset":
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(3600)  # until the lost connection cancels this
            case "hang":
                await asyncio.sleep(3600)
            case "busy" if self.busy_replies > 0:
                self.busy_replies -= 1
                return web.json_response({"error": {"message": "updating"}}, status=503)
        return None

    @staticmethod
    def _reply(mode: str, messages: list[dict[str, Any]]) -> str:
        content = str(messages[-1].get("content") or "")
        if mode in ("tools", "objects"):
            return content
        if mode == "lookup":
            return content[-1] if len(messages) == 1 else content
        if mode in ("keeps", "strips"):
            return f"<think>{len(messages)}</think>{content[-1]}"
        return content[::-1]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        mode = request.match_info["mode"]
        if (failure := await self._failure(mode, request)) is not None:
            return failure
        token_ids = self.generated_ids if mode != "noids" else []
        content = [_logprob(i, -0.25) for i in token_ids]
        choice: dict[str, Any] = {"index": 0, "token_ids": token_ids, "finish_reason": "stop"}
        if mode != "nologprobs":
            choice["logprobs"] = {"content": content}
        if mode != "nospans":
            choice["policy_spans"] = _spans(len(token_ids))
        return web.json_response({"request_id": "g", "choices": [choice]})

    async def models(self, request: web.Request) -> web.StreamResponse:
        size = {"tiny": 8, "fills": 120}.get(request.match_info["mode"], 4096)
        return web.json_response({"object": "list", "data": [{"id": "policy", "max_model_len": size}]})


def _logprob(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None, "top_logprobs": []}


def _spans(num_tokens: int) -> list[dict[str, int]]:
    """Return version 3 produced the first token, version 4 the others: an update came in between."""
    spans = [{"lineage": 0, "version": 3, "start": 0, "end": 1}]
    if num_tokens > 1:
        spans.append({"lineage": 0, "version": 4, "start": 1, "end": num_tokens})
    return spans


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine() -> AsyncIterator[FakeEngine]:
    fake = FakeEngine()
    app = web.Application()
    app.router.add_post("/{mode}/v1/chat/completions", fake.chat)
    app.router.add_post("/{mode}/inference/v1/generate", fake.generate)
    app.router.add_get("/{mode}/v1/models", fake.models)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


@dataclass
class Server:
    """An env-server, a client of it, and the log of one run."""

    service: EnvService
    sink: RolloutSink
    stub: Any
    engine: FakeEngine
    log: RunLog
    store: LocalStore
    epoch: int = 1
    _next_ordinal: int = 0
    _cursor: str = "0"
    tokenizer_manifest_key: str = ""

    async def open(
        self,
        env_id: str,
        args: dict[str, Any] | None = None,
        *,
        wait: bool = True,
        sampling: play_pb2.Sampling | None = None,
    ) -> Any:
        """Return OpenEnv until it is not LOADING any more."""
        return await self.open_spec(self.spec(env_id, args), wait=wait, sampling=sampling)

    async def open_spec(
        self, spec: play_pb2.EnvSpec, *, wait: bool = True, sampling: play_pb2.Sampling | None = None
    ) -> Any:
        request = env_service_pb2.OpenEnvRequest(env=spec, sampling=sampling)
        async with asyncio.timeout(LOAD_S):
            while True:
                reply = await call(self.stub.OpenEnv, request, timeout_s=60)
                if not wait or reply.state != env_service_pb2.ENV_STATE_LOADING:
                    return reply
                await asyncio.sleep(0.1)

    @staticmethod
    def encode_chat(messages: list[dict[str, Any]]) -> list[int]:
        return encode_chat(messages)

    @staticmethod
    def spec(env_id: str, args: dict[str, Any] | None = None) -> play_pb2.EnvSpec:
        own = dict(args or {})
        takes_several = own.pop(TAKES_SEVERAL, False)
        own_python = own.pop(PYTHON, "")
        agent = own.pop(AGENT, None)
        return play_pb2.EnvSpec(
            name=env_id,
            id=env_id,
            args_json=json.dumps(own),
            takes_several_traces=takes_several,
            python=own_python,
            agent_json=json.dumps(agent) if agent else "",
        )

    def request(self, env_id: str, task_index: int, **changes: Any) -> play_pb2.PlayGroupRequest:
        """Return a group of one with a new ordinal; `mode`, `args`, `size` and fields of the request may be given."""
        size = changes.pop("size", 1)
        values: dict[str, Any] = {
            "run_uid": self.log.uid,
            "purpose": rollout_pb2.PURPOSE_TRAIN,
            "ordinal": self._next_ordinal,
            "members": list(range(size)),
            "group_size": size,
            "env": self.spec(env_id, changes.pop("args", None)),
            "task_index": task_index,
            "base_url": self.engine.base_url(changes.pop("mode", "ok")),
            "model": "policy",
            "sampling": play_pb2.Sampling(temperature=1.0, max_tokens=16),
            "rollout_timeout_seconds": 60.0,
            "epoch": self.epoch,
            "generation": 1,
            "planned_step": 7,
            "tokenizer_manifest_key": self.tokenizer_manifest_key,
        }
        self._next_ordinal += 1
        return play_pb2.PlayGroupRequest(**{**values, **changes})

    async def play(self, *requests: play_pb2.PlayGroupRequest, timeout_s: float = 240.0) -> list[Rollout]:
        """Play the groups and wait for all their rollouts in the stream; in order of ordinal and member."""
        for request in requests:
            await call(self.stub.PlayGroup, request, timeout_s=patient(PLAY_TIMEOUT_S))
        return await self.collect(*requests, timeout_s=timeout_s)

    async def collect(self, *requests: play_pb2.PlayGroupRequest, timeout_s: float = 240.0) -> list[Rollout]:
        wanted = {(request.ordinal, member) for request in requests for member in request.members}
        found: dict[tuple[int, int], Rollout] = {}
        cursor = "0"
        async with asyncio.timeout(timeout_s):
            while wanted - found.keys():
                for entry in await self.log.read(Stream.ROLLOUTS, after=cursor, block_s=1):
                    cursor = entry.id
                    rollout = decode_rollout(entry.d)
                    if (rollout.ordinal, rollout.member) in wanted:
                        assert (rollout.ordinal, rollout.member) not in found, "appended twice"
                        found[(rollout.ordinal, rollout.member)] = rollout
        return [found[key] for key in sorted(wanted)]

    async def play_one(self, env_id: str, task_index: int, **changes: Any) -> Rollout:
        [rollout] = await self.play(self.request(env_id, task_index, **changes))
        return rollout


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Return 256 byte symbols and ChatML, no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols = [*alphabet, "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    core = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="module")
def tokenizer_manifest_key(server: "Server", tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return publish a policy that carries the tokenizer, as a trainer does, and make the engine speak it."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    published = publish_policy(
        server.store,
        PolicyPlace(prefix="test", uid=server.log.uid, lineage=0, version=0),
        PolicyContents(
            tensors=[("w", TensorBytes.from_numpy(np.zeros(2, np.float32)))],
            files={path.name: path.read_bytes() for path in directory.iterdir()},
        ),
        epoch=1,
    )
    server.engine.generated_ids = [*tokenizer.encode("oh"), tokenizer.eos_token_id]
    server.tokenizer_manifest_key = published.manifest_key
    return published.manifest_key


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def starter(environments_on_path: None) -> AsyncIterator[WorkerStarter]:
    """Yield what starts workers: its template imports once per session what they need."""
    made = WorkerStarter()
    yield made
    await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(
    engine: FakeEngine, starter: WorkerStarter, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    """Yield one env-server per test module: a worker takes seconds to start."""
    store = LocalStore(tmp_path_factory.mktemp("store"))
    redis = open_redis(redis_url)
    log = await RunLog.create(redis, store, "test", f"r{uuid.uuid4().hex[:12]}", b'{"run_hash": "0"}')

    async def open_log(run_uid: str) -> RunLog:
        return await RunLog.open(redis, store, prefix="test", uid=run_uid)

    async def is_over(run_uid: str) -> bool:
        return await asyncio.to_thread(has_ended, store, Names("test", run_uid))

    tokenizers = TokenizerFiles(store)
    teachers = Teachers(store, tokenizers, prefix="test", key_problem=teacher_key_problem)
    sink = RolloutSink(Spool(None, limit_bytes=1 << 30), open_log, is_over, max_delay_s=0.5)
    service = EnvService(
        sink=sink,
        tokenizers=tokenizers,
        worker_id="env-server-test",
        starter=starter,
        capacity=64,
        limits=PoolLimits(blocked_grace_s=4.0),
        teachers=teachers,
        admits=Admits(pythons=["*"]),
    )

    def register(grpc_server: grpc.aio.Server, draining: asyncio.Event) -> list[str]:
        env_service_pb2_grpc.add_EnvServiceServicer_to_server(service, grpc_server)
        return ["millrace.internal.v1.EnvService"]

    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stopping = asyncio.Event()
    serving = asyncio.create_task(
        serve(
            "127.0.0.1:0",
            register,
            shutdown=Shutdown(drain_s=0, grace_s=1),
            on_started=started.set_result,
            stopping=stopping,
            handle_signals=False,
        )
    )
    async with open_channel(f"127.0.0.1:{await started}") as channel:
        yield Server(service, sink, env_service_pb2_grpc.EnvServiceStub(channel), engine, log, store)
    stopping.set()
    await serving
    await service.close()
    await teachers.close()
    await sink.close()
    tokenizers.close()
    await redis.aclose()
