"""What the orchestrator's integration tests share."""

import asyncio

from millrace.config.load import validate_document
from millrace.rpc.channel import call, stream
from millrace.v1 import run_pb2, run_service_pb2

CONFIG = {
    "model": {"name": "m"},
    "max_steps": 3,
    "seq_len": 64,
    "orchestrator": {
        "batch_size": 8,
        "rollouts_per_example": 4,
        "rollout_timeout_s": 5.0,
        "env": [{"id": "reverse-text"}],
        "sampling": {"max_tokens": 8},
        "eval": {"rollouts_per_example": 2},
    },
}


def config_json(**orchestrator) -> str:
    document = {**CONFIG, "orchestrator": {**CONFIG["orchestrator"], **orchestrator}}
    return validate_document(document).resolved_json()


async def create(stack, *, run_id: str = "", request_id: str = "", **orchestrator) -> run_pb2.Run:
    request = run_service_pb2.CreateRunRequest(
        kind=run_pb2.RUN_KIND_RL, config_json=config_json(**orchestrator), run_id=run_id, request_id=request_id
    )
    return (await call(stack.runs.CreateRun, request)).run


async def watch(stack, run: run_pb2.Run, *, timeout_s: float = 40.0) -> list:
    async with asyncio.timeout(timeout_s):
        responses = stream(stack.runs.WatchRun, run_service_pb2.WatchRunRequest(name=run.name))
        return [response.event async for response in responses if response.HasField("event")]


def bodies(events, kind: str) -> list:
    return [getattr(event, kind) for event in events if event.WhichOneof("body") == kind]
