"""What the orchestrator does when workers come and go, runs are cancelled early, and one run is sick."""

import asyncio
import subprocess
import sys
from pathlib import Path

from millrace.internal.v1 import batch_pb2, rollout_pb2, worker_service_pb2
from millrace.orchestrator import workers
from millrace.rollouts.types import RolloutStatus
from millrace.rpc.channel import call
from millrace.runlog import RunLog
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.orchestrator.runs import bodies, create, watch
from millrace_testing.polling import until
from millrace_testing.runlog.committed import load_headers


async def state_of(stack, run) -> int:
    return (await call(stack.runs.GetRun, run_service_pb2.GetRunRequest(name=run.name))).run.state


async def test_a_new_env_server_takes_over_what_a_dead_one_held(stack, monkeypatch) -> None:
    monkeypatch.setattr(workers, "LEASE_S", 2.0)
    dead = await stack.env_server(silent=set(range(1000)), worker_id="env-server-dead")
    await stack.inference()
    trainer = await stack.trainer()
    run = await create(stack)
    watching = asyncio.create_task(watch(stack, run))
    await until(lambda: any(request.purpose == rollout_pb2.PURPOSE_TRAIN for request in dead.requests), timeout_s=20)
    await stack.kill_worker("env-server-dead")
    await stack.env_server(worker_id="env-server-new")
    events = await watching
    assert bodies(events, "state_changed")[-1].new_state == run_pb2.RUN_STATE_SUCCEEDED
    first = [r for header in trainer.headers for r in header.resolutions if r.ordinal == 0]
    assert [(r.outcome, r.attempts) for r in first] == [(batch_pb2.ORDINAL_OUTCOME_TRAINED, 2)]


async def test_a_queued_run_is_cancelled_without_any_worker(stack) -> None:
    run = await create(stack)
    await call(stack.runs.CancelRun, run_service_pb2.CancelRunRequest(name=run.name))
    events = await watch(stack, run, timeout_s=15.0)
    assert bodies(events, "state_changed")[-1].new_state == run_pb2.RUN_STATE_CANCELLED


async def test_a_starting_run_is_cancelled_although_its_policy_never_comes(stack) -> None:
    await stack.env_server()
    trainer = await stack.trainer()  # no replica: the policy is never served
    run = await create(stack)
    async with asyncio.timeout(15):
        while await state_of(stack, run) != run_pb2.RUN_STATE_STARTING:
            await asyncio.sleep(0.05)
    await call(stack.runs.CancelRun, run_service_pb2.CancelRunRequest(name=run.name))
    events = await watch(stack, run, timeout_s=15.0)
    assert bodies(events, "state_changed")[-1].new_state == run_pb2.RUN_STATE_CANCELLED
    assert trainer.headers[-1].outcome == batch_pb2.RUN_OUTCOME_CANCELLED


async def test_a_run_closes_once_even_if_the_trainer_gives_up_behind_the_closing_header(stack) -> None:
    await stack.env_server()
    await stack.inference()
    trainer = await stack.trainer()
    trainer.error_at_close = ("SCORE_FAILED", "could not score")
    run = await create(stack)
    events = await watch(stack, run)
    assert bodies(events, "state_changed")[-1].new_state == run_pb2.RUN_STATE_SUCCEEDED, "the header says so"
    reasons = [warning.reason for warning in bodies(events, "warning")]
    # That Redis is silent for a while is true of a machine that is busy enough.
    assert [reason for reason in reasons if reason != "REDIS_SILENT"] == ["SCORE_FAILED"]
    log = await RunLog.open(stack.deps["redis"], stack.deps["store"], prefix=stack.prefix, uid=run.uid)
    headers, _ = await load_headers(log)
    assert [header.kind for header in headers].count(batch_pb2.BATCH_KIND_CLOSE) == 1


async def test_two_runs_share_one_trainer_in_the_order_of_their_creation(stack) -> None:
    first, second = await create(stack, run_id="one"), await create(stack, run_id="two")
    await stack.env_server()
    await stack.inference()
    await stack.trainer()
    events = await asyncio.gather(watch(stack, first), watch(stack, second))
    ends = [e[-1].time.ToNanoseconds() for e in events]
    starts = [e[0].time.ToNanoseconds() for e in events]
    assert ends[0] <= starts[1]


async def test_evaluation_tasks_that_fail_are_played_again_once(stack) -> None:
    broken = {("eval", 0, 0, 0): RolloutStatus.ENV_ERROR}
    broken |= {("eval", 1, 1, attempt): RolloutStatus.TIMEOUT for attempt in range(5)}
    await stack.env_server(broken=broken)
    await stack.inference()
    await stack.trainer()
    events = await watch(stack, await create(stack))
    assert [(e.num_rollouts, e.num_failed) for e in bodies(events, "eval_completed")] == [(5, 1), (5, 1)]


async def test_a_trainer_that_works_on_another_run_is_not_free() -> None:
    registry = workers.WorkerRegistry()
    kind = workers.WorkerKind.TRAINER
    for name, uid in (("a", "other"), ("b", "mine"), ("c", "")):
        registry.register(worker_service_pb2.Worker(worker_id=name, kind=worker_service_pb2.WORKER_KIND_TRAINER))
        status = worker_service_pb2.TrainerStatus(run_uid=uid)
        registry.heartbeat(worker_service_pb2.HeartbeatRequest(worker_id=name, trainer=status))
    assert registry.claim(kind, "mine", limit=1) == 1
    assert [record.worker_id for record in registry.owned(kind, "mine")] == ["b"]


def test_a_port_in_use_exits_5_with_the_remedy(stack_urls, tmp_path: Path) -> None:
    import socket

    redis_url, store_url = stack_urls
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        environ = {"MILLRACE_REDIS_URL": redis_url, "MILLRACE_STORE_URL": store_url, "MILLRACE_LISTEN": address}
        ended = subprocess.run(
            [sys.executable, "-m", "millrace.orchestrator.main"],
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 5
    assert address in ended.stderr and "choose ano" in ended.stderr and "Traceback" not in ended.stderr
