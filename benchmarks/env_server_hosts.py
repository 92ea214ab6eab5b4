"""The servers that `env_server.py` compares, each in a process of its own; nothing to start by hand.

    python benchmarks/env_server_hosts.py ours PLACE --redis URL --workers N
    python benchmarks/env_server_hosts.py v0 PLACE --workers N
    python benchmarks/env_server_hosts.py v1 PLACE --workers N

`ours` is the env-server's service as its process runs it, spool on disk and log in Redis, without an orchestrator to
register with. `v0` and `v1` are the servers that verifiers brings for its two generations, `ZMQEnvServer` and the pool
of `serve_env`, with their own clients of the engine. A server writes its address to PLACE/address.
"""

import argparse
import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import grpc.aio

from millrace.local.directory import free_ports

ENVIRONMENTS = {"v0": "reverse-text", "v1": "rev-text-v1"}
HARNESS = "inprocess_harness"
"""Module of a harness for verifiers' v1 server that asks the interception over HTTP: its own one starts a process."""
HARNESS_SOURCE = """import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult


class PlainHarnessConfig(vf.HarnessConfig):
    pass


class PlainHarness(vf.Harness[PlainHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = NEEDS_CONTAINER = False
    http = None

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **kwargs):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt]
        if PlainHarness.http is None:
            PlainHarness.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        headers, body = {"Authorization": f"Bearer {secret}"}, {"model": ctx.model, "messages": messages}
        url = f"{endpoint}/chat/completions"
        async with PlainHarness.http.post(url, headers=headers, json=body) as reply:
            text = await reply.text()
            return ProgramResult(exit_code=reply.status != 200, stdout="", stderr=text if reply.status != 200 else "")


__all__ = ["PlainHarness"]
"""
V1_TASKSET = {"id": ENVIRONMENTS["v1"], "num_examples": 64}
CAPACITY = 4096


def v1_config() -> dict[str, Any]:
    """The environment of v1 for verifiers' own server: the same taskset and kind of place as ours."""
    return {"taskset": V1_TASKSET, "agent": {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}}


def host_v0(place: Path, num_workers: int) -> None:
    """verifiers' server for v0, until SIGTERM."""
    from verifiers.legacy.serve.server.zmq_env_server import ZMQEnvServer

    [port] = free_ports(1)
    address = f"tcp://127.0.0.1:{port}"
    (place / "address").write_text(address)
    ZMQEnvServer.run_server(
        ENVIRONMENTS["v0"],
        address=address,
        num_workers=num_workers,
        log_level="WARNING",
        console_logging=True,
        file_logging=False,
    )


def host_v1(place: Path, num_workers: int) -> None:
    """verifiers' pool for v1, until SIGTERM."""
    import verifiers.v1 as vf
    from verifiers.v1.serve import env_config_data, serve_env

    [port] = free_ports(1)
    address = f"tcp://127.0.0.1:{port}"
    config = vf.resolve_env_config(v1_config())
    (place / "address").write_text(address)
    serve_env(max_workers=num_workers, address=address, elastic=False, config_data=env_config_data(config))


async def host_ours(place: Path, redis_url: str, num_workers: int) -> None:
    """Our service, until SIGTERM; runs lie under `bench` in the store of the directory."""
    from millrace.env_server.service import EnvService
    from millrace.env_server.sink import RolloutSink
    from millrace.env_server.spool import Spool
    from millrace.env_server.tokenizer_files import TokenizerFiles
    from millrace.env_server.workers.pool import PoolLimits
    from millrace.env_server.workers.starter import WorkerStarter
    from millrace.internal.v1 import env_service_pb2_grpc
    from millrace.rpc.serve import serve
    from millrace.runlog.names import Names
    from millrace.runlog.records.revisions import has_ended
    from millrace.runlog.redis.connection import open_redis
    from millrace.runlog.redis.log import RunLog
    from millrace.storage.local import LocalStore

    store, redis = LocalStore(place / "store"), open_redis(redis_url)

    async def open_log(run_uid: str) -> RunLog:
        return await RunLog.open(redis, store, prefix="bench", uid=run_uid)

    async def is_over(run_uid: str) -> bool:
        return await asyncio.to_thread(has_ended, store, Names("bench", run_uid))

    sink = RolloutSink(Spool(place / "spool", limit_bytes=1 << 30), open_log, is_over)
    tokenizers, starter = TokenizerFiles(store), WorkerStarter()
    service = EnvService(
        sink=sink,
        tokenizers=tokenizers,
        worker_id="env-server-bench",
        starter=starter,
        capacity=CAPACITY,
        limits=PoolLimits(num_workers=num_workers),
    )

    def register(server: grpc.aio.Server, draining: asyncio.Event) -> list[str]:
        env_service_pb2_grpc.add_EnvServiceServicer_to_server(service, server)
        return ["millrace.internal.v1.EnvService"]

    def note_port(port: int) -> None:
        (place / "address").write_text(f"127.0.0.1:{port}")

    try:
        await serve("127.0.0.1:0", register, on_started=note_port)
    finally:
        await service.close()
        await sink.close()
        await starter.close()
        tokenizers.close()
        await redis.aclose()


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("ours", "v0", "v1"))
    parser.add_argument("place", type=Path)
    parser.add_argument("--redis", default="")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    match options.kind:
        case "v0":
            host_v0(options.place, options.workers)
        case "v1":
            host_v1(options.place, options.workers)
        case _:
            asyncio.run(host_ours(options.place, options.redis, options.workers))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
