"""What the orchestrator's integration tests share."""

import asyncio
import json

from millrace.config.load import validate_document
from millrace.internal.v1 import batch_pb2
from millrace.readers.audit import audit_run
from millrace.rollouts.batch_wire import decode_header
from millrace.rpc.channel import call, stream
from millrace.runlog import Names, RunLog
from millrace.runlog.records.revisions import list_headers, read_header, read_rollouts
from millrace.runlog.token_use import TokenUse
from millrace.storage import ObjectStore
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.runlog.committed import load_headers

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


def config_json(*, max_steps: int = 3, **orchestrator) -> str:
    document = {**CONFIG, "max_steps": max_steps, "orchestrator": {**CONFIG["orchestrator"], **orchestrator}}
    return validate_document(document).resolved_json()


async def create(stack, *, run_id: str = "", request_id: str = "", **orchestrator) -> run_pb2.Run:
    request = run_service_pb2.CreateRunRequest(
        kind=run_pb2.RUN_KIND_RL, config_json=config_json(**orchestrator), run_id=run_id, request_id=request_id
    )
    return (await call(stack.runs.CreateRun, request)).run


async def submit(stack, name: str, *, max_steps: int = 1, **queue) -> run_pb2.Run:
    """Create a run without evaluations, with these keys of `[queue]`."""
    document = {**json.loads(config_json(max_steps=max_steps, eval=None)), "queue": queue}
    request = run_service_pb2.CreateRunRequest(kind=run_pb2.RUN_KIND_RL, config_json=json.dumps(document), run_id=name)
    return (await call(stack.runs.CreateRun, request)).run


async def watch(stack, run: run_pb2.Run, *, timeout_s: float = 40.0) -> list:
    async with asyncio.timeout(timeout_s):
        responses = stream(stack.runs.WatchRun, run_service_pb2.WatchRunRequest(name=run.name))
        return [response.event async for response in responses if response.HasField("event")]


def bodies(events, kind: str) -> list:
    return [getattr(event, kind) for event in events if event.WhichOneof("body") == kind]


async def get(stack, run: run_pb2.Run) -> run_pb2.Run:
    return (await call(stack.runs.GetRun, run_service_pb2.GetRunRequest(name=run.uid))).run


async def has_state(stack, run: run_pb2.Run, state: run_pb2.RunState) -> bool:
    return (await get(stack, run)).state == state


def states(events) -> list[str]:
    return [run_pb2.RunState.Name(change.new_state)[10:] for change in bodies(events, "state_changed")]


def resolutions(headers) -> dict[int, tuple[int, str, int]]:
    """Return the outcome, reason and attempts of every ordinal; fails if one is resolved twice, or one is left out."""
    found = {}
    for header in headers:
        for item in header.resolutions:
            assert item.ordinal not in found, f"ordinal {item.ordinal} is resolved twice"
            found[item.ordinal] = (item.outcome, item.reason, item.attempts)
    assert sorted(found) == list(range(len(found))), "no ordinal is left out"
    return found


def numbers(events) -> dict[str, list[int]]:
    """Return the numbers of the events of each writer, in the order in which they came."""
    found: dict[str, list[int]] = {}
    for event in events:
        found.setdefault(event.writer, []).append(event.writer_sequence)
    return found


async def log_of(stack, run) -> RunLog:
    return await RunLog.open(stack.deps["redis"], stack.deps["store"], prefix=stack.prefix, uid=run.uid)


async def restart_orchestrator(stack) -> None:
    port = int(stack.address.rpartition(":")[2])
    await stack.kill_orchestrator()
    await stack.start_orchestrator(port)


async def pause(stack, run, reason: str = "") -> None:
    await call(stack.runs.PauseRun, run_service_pb2.PauseRunRequest(name=run.name, reason=reason))


async def resume(stack, run) -> None:
    await call(stack.runs.ResumeRun, run_service_pb2.ResumeRunRequest(name=run.name))


async def wipe(stack) -> None:
    """Delete every key of the deployment, as FLUSHALL would; other tests share the server."""
    redis = stack.deps["redis"]
    keys = [key async for key in redis.scan_iter(match=f"{stack.prefix}:*", count=1000)]
    if keys:
        await redis.delete(*keys)


async def headers_of(stack, run) -> list[batch_pb2.BatchHeader]:
    return (await load_headers(await log_of(stack, run)))[0]


def archived_tokens(store: ObjectStore, names: Names) -> TokenUse:
    """Return the tokens of the rollouts in all archives of a run."""
    found = TokenUse()
    for step, revision in list_headers(store, names):
        header = decode_header(read_header(store, names, step, revision))
        found = found.plus(read_rollouts(store, header))
    return found


async def require_clean(stack, run) -> None:
    report = await audit_run(stack.deps["redis"], stack.deps["store"], prefix=stack.prefix, uid=run.uid)
    # The fake trainer writes no policies, no checkpoints and no reports.
    theirs = ("POLICY_", "STEP_NOT_REPORTED")
    ours = [v for v in report.violations if "/policies/" not in v.message and not v.check.startswith(theirs)]
    assert not ours, ours
