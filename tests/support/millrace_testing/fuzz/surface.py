"""The gRPC and HTTP APIs as fuzz targets: real servers in this process, called over loopback.

Whatever is sent, a call is answered: with a result or with a status that blames the request, never with INTERNAL,
UNKNOWN or 500, and never by silence.
"""

import asyncio
import logging
import tempfile
import threading
from collections.abc import Coroutine
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from millrace.errors import InvalidSpecError
from millrace.v1.run_service_pb2 import CreateRunRequest

ANSWER_S = 15.0
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "n": 2, "seed": 1, "stop": ["x"]}
TOOL = {"type": "function", "function": {"name": "f"}}
TEXT = {"max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "prompt_logprobs": 0}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
TOKENS = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2, "n": 2, "stop_token_ids": [5]}}
HTTP_BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{**CHAT, "logprobs": True}, {**CHAT, **STREAM, "tools": [TOOL]}],
    "/v1/completions": [
        {**TEXT, "prompt": ["a", "b"]},
        {"prompt": [1, 2, 3], "max_tokens": 2, **STREAM},
        {"prompt": "a", "max_tokens": 2, "n": 2, "logprobs": 0, "stream_choices": True},
    ],
    "/inference/v1/generate": [TOKENS],
    "/tokenize": [{"prompt": "abc"}, {"messages": CHAT["messages"], "return_token_strs": True}],
}


@cache
def methods() -> dict[str, Any]:
    """Return the request type of each unary method of our services, by path.

    WatchRun is included; its first answer counts.
    """
    from google.protobuf.message_factory import GetMessageClass

    from millrace.internal.v1 import env_service_pb2, policy_service_pb2, worker_service_pb2
    from millrace.v1 import run_service_pb2

    return {
        f"/{service.full_name}/{method.name}": GetMessageClass(method.input_type)
        for module in (run_service_pb2, worker_service_pb2, env_service_pb2, policy_service_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


class EventLoop:
    """An event loop in a thread of its own, so that a test without one can call it."""

    def __init__(self) -> None:
        logging.disable(logging.CRITICAL)  # every refused call is a line
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.run(self._start(), timeout_s=120.0)

    def run(self, work: Coroutine[Any, Any, Any], *, timeout_s: float = ANSWER_S + 5.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    async def _start(self) -> None:
        raise NotImplementedError


class Grpc(EventLoop):
    """An orchestrator over a real Redis and a store; an env-server without workers; an engine without a model."""

    async def _start(self) -> None:
        from millrace.local.redis import EmbeddedRedis
        from millrace.orchestrator.serve import serve_orchestrator
        from millrace.rpc.channel import open_channel
        from millrace.telemetry.settings import Settings

        place = Path(tempfile.mkdtemp(prefix="millrace-fuzz-"))
        (place / "redis").mkdir()
        self._redis = EmbeddedRedis(place / "redis", append_only="none").__enter__()
        settings = Settings(
            redis_url=self._redis.url, store_url=f"file://{place}/store", prefix="fuzz", listen="127.0.0.1:0"
        )
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._tasks = [
            asyncio.create_task(serve_orchestrator(settings, on_started=started.set_result, handle_signals=False))
        ]
        await asyncio.wait({started, *self._tasks}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        orchestrator = open_channel(f"127.0.0.1:{started.result()}")
        workers = open_channel(f"127.0.0.1:{await self._start_workers(place)}")
        self._channels = {"RunService": orchestrator, "WorkerService": orchestrator}
        self._channels |= {"EnvService": workers, "PolicyService": workers}
        await self._create_run(orchestrator)

    async def _create_run(self, channel: Any) -> None:
        from millrace.config.load import validate_document
        from millrace.v1 import run_service_pb2, run_service_pb2_grpc
        from millrace_testing.fuzz.seeds import MINIMAL

        config = validate_document(MINIMAL).resolved_json()
        request = run_service_pb2.CreateRunRequest(kind=1, run_id="fuzz", config_json=config)  # pyright: ignore
        await run_service_pb2_grpc.RunServiceStub(channel).CreateRun(request, timeout=30)

    async def _start_workers(self, place: Path) -> int:
        from millrace.env_server import service as env_service
        from millrace.env_server.sink import RolloutSink
        from millrace.env_server.spool import Spool
        from millrace.env_server.tokenizer_files import TokenizerFiles
        from millrace.env_server.workers.pool import EnvPool
        from millrace.inference.embedded.engine import EmbeddedEngine
        from millrace.inference.model_files import ModelSlot
        from millrace.inference.service import PolicyServicer
        from millrace.inference.updater import PolicyUpdater
        from millrace.internal.v1 import env_service_pb2_grpc, policy_service_pb2_grpc
        from millrace.policies.host_copy import HostCopy
        from millrace.rpc.serve import serve
        from millrace.storage.local import LocalStore

        class IdlePool(EnvPool):
            """A pool that never loads its environment: what is fuzzed are the requests, not their code."""

            def start(self) -> None: ...

        env_service.EnvPool = IdlePool  # pyright: ignore

        async def no_log(run_uid: str) -> Any:
            raise InvalidSpecError([], message="no log")

        async def is_over(run_uid: str) -> bool:
            return True

        store, engine, slot = LocalStore(place / "store"), EmbeddedEngine(max_num_seqs=4), ModelSlot()
        sink = RolloutSink(Spool(None, limit_bytes=1 << 20), no_log, is_over, max_delay_s=0.5)
        nobody: Any = None  # starts no worker: nothing is loaded
        env = env_service.EnvService(
            sink=sink, tokenizers=TokenizerFiles(store), worker_id="fuzz", starter=nobody, capacity=8
        )
        policy = PolicyServicer(engine, PolicyUpdater(engine, slot, store, HostCopy(store)))

        def register(server: Any, _: Any) -> list[str]:
            env_service_pb2_grpc.add_EnvServiceServicer_to_server(env, server)
            policy_service_pb2_grpc.add_PolicyServiceServicer_to_server(policy, server)
            return ["millrace.internal.v1.EnvService", "millrace.internal.v1.PolicyService"]

        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = serve("127.0.0.1:0", register, on_started=started.set_result, handle_signals=False)
        self._tasks.append(asyncio.create_task(serving))
        return await asyncio.wait_for(started, 30)

    def call(self, data: bytes) -> Any:
        """Make one call; raise a `millrace.errors` class for a status that blames the request, AssertionError for one
        that does not.
        """
        path, _, body = data.partition(b"\n")
        return self.run(self._call(path.decode(), body))

    async def _call(self, path: str, body: bytes) -> Any:
        import grpc

        from millrace.rpc.status import from_rpc_error

        channel = self._channels[path.split("/")[1].rpartition(".")[2]]
        try:
            if path.endswith("/WatchRun"):
                stream = channel.unary_stream(path)(body, timeout=ANSWER_S)
                try:
                    await asyncio.wait_for(anext(aiter(stream), None), 0.2)
                except TimeoutError:
                    pass
                finally:
                    stream.cancel()
                return None
            if path.endswith("/CreateRun") and _loads_environments(body):
                return None  # loading an environment may take minutes
            return await channel.unary_unary(path)(body, timeout=ANSWER_S) and None
        except grpc.aio.AioRpcError as error:
            wrong = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}
            assert error.code() not in wrong, f"{path} answered {error.code().name}: {error.details()}"
            raise from_rpc_error(error) from None


class Http(EventLoop):
    """The embedded engine's API over a tiny model."""

    async def _start(self) -> None:
        import aiohttp

        from millrace.inference.embedded.engine import EmbeddedEngine
        from millrace.inference.engine import PolicyIdentity
        from millrace.inference.http.server import HttpApi, start_http
        from millrace.inference.model_files import ModelSlot, ServedModel, load_tokenizer
        from millrace_testing.inference import tiny

        place = Path(tempfile.mkdtemp(prefix="millrace-fuzz-"))
        tiny.tiny_config().save_pretrained(place)
        tiny.tiny_tokenizer().save_pretrained(place)
        tiny.tiny_model(0).save_pretrained(place)
        engine, slot = EmbeddedEngine(max_num_seqs=64), ModelSlot()
        await engine.load(place, None, identity=PolicyIdentity(run_uid="", lineage=0, version=0))
        slot.current = ServedModel(names=("policy",), directory=place, tokenizer=load_tokenizer(place))
        self._server = await start_http(HttpApi(engine, slot), "127.0.0.1", 0)
        self._session = aiohttp.ClientSession(
            f"http://127.0.0.1:{self._server.port}", timeout=aiohttp.ClientTimeout(ANSWER_S)
        )

    def call(self, data: bytes) -> Any:
        """Send one request and return the answer.

        Raise InvalidSpecError for a status that blames the request, AssertionError for another error.
        """
        path, _, body = data.partition(b"\n")
        return self.run(self._call(path.decode(), body))

    async def _call(self, path: str, body: bytes) -> Any:
        async with self._session.post(path, data=body) as answer:
            text = await answer.text()
        assert answer.status < 500, f"{path} answered {answer.status}: {text[:200]}"
        if answer.status >= 400:
            from millrace.errors import Violation

            raise InvalidSpecError([Violation(field="body", message=text)])


def _loads_environments(body: bytes) -> bool:
    try:
        return CreateRunRequest.FromString(body).check_environments
    except DecodeError:
        return False
