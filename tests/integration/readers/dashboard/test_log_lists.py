"""ListMetrics, ListRollouts and GetLineage of a real orchestrator, over a log as a run writes it, with the client."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from millrace.client import Client
from millrace.errors import InvalidSpecError, NotFoundError, UnauthenticatedError, UnavailableError
from millrace.local.redis import free_port
from millrace.orchestrator.serve import serve_orchestrator
from millrace.rpc.access import ClientAccess
from millrace.rpc.channel import call, open_channel
from millrace.rpc.tokens import new_token, token_line
from millrace.runlog.names import Names
from millrace.storage.local import LocalStore
from millrace.telemetry.settings import Settings
from millrace.v1 import event_pb2
from millrace.v1 import run_service_pb2 as rs
from millrace.v1.run_service_pb2_grpc import RunServiceStub
from millrace_testing.dashboard import SECRET, START, RunWriter

CONFIG = {
    "model": {"name": "m"},
    "orchestrator": {"batch_size": 8, "rollouts_per_example": 4, "env": [{"id": "reverse-text"}]},
}
STEPS = 5


@dataclass
class Deployment:
    """An orchestrator without workers and without a dashboard, with one run whose log is in its store."""

    address: str
    client: Client
    stub: RunServiceStub
    writer: RunWriter


@pytest.fixture
async def deployment(redis_url, tmp_path, monkeypatch) -> AsyncIterator[Deployment]:
    monkeypatch.setenv("MILLRACE_SCRATCH_DIR", str(tmp_path / "scratch"))
    prefix = f"lists{free_port()}"
    store = LocalStore(tmp_path / "store")
    settings = Settings(
        redis_url=redis_url, store_url=(tmp_path / "store").as_uri(), prefix=prefix, listen="127.0.0.1:0",
        drain_s=0.0, grace_s=1.0,
    )  # fmt: skip
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(
        serve_orchestrator(settings, on_started=started.set_result, handle_signals=False), name="orchestrator"
    )
    await asyncio.wait({started, running}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    address = f"127.0.0.1:{started.result()}"
    async with Client(address) as client, open_channel(address) as channel:
        run = await client.runs.create(json.dumps(CONFIG), run_id="letters-1")
        writer = RunWriter(store=store, names=Names(prefix, run.uid))
        for step in range(STEPS):
            writer.step(step, [f"the key is {SECRET}"] if step == 1 else ())
        saved = event_pb2.CheckpointSaved(step=2, uri="file:///c/2", size_bytes=7)
        writer.archive((START + 20.0, event_pb2.Event(checkpoint_saved=saved)))
        yield Deployment(address, client, RunServiceStub(channel), writer)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_metrics_are_columns_by_step_over_pages(deployment):
    found = await deployment.client.runs.metrics("runs/letters-1")
    assert {len(column) for column in found.values()} == {STEPS + 1}  # of version 5 only what is said of a version
    assert found["step"] == list(range(STEPS + 1))
    assert found["reward/mean"] == [0.0, 0.25, 0.5, 0.75, 1.0, None]
    assert found["checkpoint/size_bytes"] == [None, None, 7.0, None, None, None]
    some = await deployment.client.runs.metrics("runs/letters-1", names=["loss/mean"])
    assert sorted(some) == ["loss/mean", "step"] and len(some["step"]) == STEPS
    request, steps = rs.ListMetricsRequest(parent="runs/letters-1", page_size=2, names=["reward/mean"]), []
    for size in (2, 2, 1):
        page = await call(deployment.stub.ListMetrics, request)
        assert len(page.steps) == size
        steps += [each.step for each in page.steps]
        request.page_token = page.next_page_token
    assert steps == list(range(STEPS)) and not request.page_token


async def test_a_loss_that_is_not_a_number_is_told(deployment):
    done = event_pb2.StepCompleted(step=STEPS, metrics={"loss/mean": math.nan})
    deployment.writer.archive((START + 30.0, event_pb2.Event(step_completed=done)))
    found = await deployment.client.runs.metrics("runs/letters-1", names=["loss/mean"])
    assert math.isnan(found["loss/mean"][-1]) and len(found["step"]) == STEPS + 1


async def test_rollouts_are_columns_filtered_and_sorted(deployment):
    runs = deployment.client.runs
    found = await runs.rollouts("runs/letters-1")
    assert {len(column) for column in found.values()} == {4 * STEPS}
    assert found["id"][:5] == ["0-0", "0-1", "0-2", "0-3", "1-0"] and found["step"] == sorted(found["step"])
    assert found["reward"][:3] == [0.0, 0.5, 1.0] and found["status"][3] == "env_error"
    assert found["max_version"][3] is None and found["max_version"][8] == 1
    assert SECRET not in str(found) and any("the key is" in text for text in found["completion"])
    best = await runs.rollouts("runs/letters-1", min_reward=0.4, outcome="trained", order_by="reward desc", limit=3)
    assert best["reward"] == [1.0, 1.0, 1.0] and best["is_trained"] == [True] * 3
    assert (await runs.rollouts("runs/letters-1", env="nowhere"))["id"] == []


async def test_pages_of_rollouts_fit_together_while_the_run_goes_on(deployment):
    request, ids = rs.ListRolloutsRequest(parent="runs/letters-1", page_size=3, order_by="step desc"), []
    while True:
        page = await call(deployment.stub.ListRollouts, request)
        assert page.total_size == 4 * STEPS
        ids += [each.name for each in page.rollouts]
        request.page_token = page.next_page_token
        if len(ids) == 3:
            deployment.writer.step(STEPS)
            await asyncio.sleep(2.5)  # from then on the index is brought up to date
        if not request.page_token:
            break
    assert len(ids) == len(set(ids)) == 4 * STEPS
    request.page_token = ""
    assert (await call(deployment.stub.ListRollouts, request)).total_size == 4 * (STEPS + 1)


async def test_what_a_list_refuses(deployment):
    async def refused(method: str, request: object) -> InvalidSpecError:
        with pytest.raises(InvalidSpecError) as caught:
            await call(getattr(deployment.stub, method), request)
        return caught.value

    first = await call(deployment.stub.ListRollouts, rs.ListRolloutsRequest(parent="runs/letters-1", page_size=3))
    token, run = first.next_page_token, "runs/letters-1"
    for bad in ("!!", "MTI=", "Zm9v", token[:-4]):
        error = await refused("ListRollouts", rs.ListRolloutsRequest(parent=run, page_token=bad))
        assert "page_token" in error.message and error.reason in ("PAGE_TOKEN_INVALID", "SPEC_INVALID")
    other = await refused("ListRollouts", rs.ListRolloutsRequest(parent=run, page_token=token, order_by="reward"))
    assert "another request" in other.message and other.remedy
    assert "page_size" in str(await refused("ListMetrics", rs.ListMetricsRequest(parent=run, page_size=-1)))
    assert "order_by" in str(await refused("ListRollouts", rs.ListRolloutsRequest(parent=run, order_by="step up")))
    wrong = await refused("ListRollouts", rs.ListRolloutsRequest(parent=run, filter={"min_reward": "x", "colour": "y"}))
    assert "min_reward" in wrong.message and "colour" in wrong.message and wrong.reason == "QUERY_INVALID"
    assert "offset" in str(await refused("ListRollouts", rs.ListRolloutsRequest(parent=run, filter={"offset": "3"})))
    assert "subject" in str(await refused("GetLineage", rs.GetLineageRequest(name=run)))
    with pytest.raises(NotFoundError):
        await deployment.client.runs.metrics("runs/nobody")


async def test_lineage_leads_back_and_forward(deployment):
    runs = deployment.client.runs
    found = (await runs.lineage("runs/letters-1", rollout="3-1")).rollout
    assert (found.rollout.step, found.rollout.reward, found.rollout.is_trained) == (3, 0.5, True)
    [made_by] = found.made_by
    assert (made_by.version, made_by.num_tokens, made_by.batch.step) == (2, 3, 1)
    assert made_by.checkpoint.uri == "file:///c/2" and made_by.replicas == ["inference-1"]
    assert (found.batch.step, found.batch.num_rollouts, found.batch.num_trained) == (3, 4, 3) and found.batch.is_done
    assert found.became.version == 4 and found.became.checkpoint.step == 2
    failed = (await runs.lineage("runs/letters-1", rollout="3-3")).rollout
    assert not failed.made_by and not failed.HasField("became") and failed.batch.step == 3
    version = (await runs.lineage("runs/letters-1", version=2)).version
    assert version.version.batch.num_trained == 3 and version.version.is_known
    assert [each.name for each in version.made_from.rollouts] == [f"runs/letters-1/rollouts/1-{n}" for n in range(3)]
    assert version.made.num_rollouts == 3 and version.made.rollouts[0].step == 3 and version.trained_steps == [3]
    assert version.next.version == 3
    newest = (await runs.lineage("runs/letters-1", version=STEPS)).version
    assert not newest.HasField("next") and newest.made.num_rollouts == 0


async def test_lineage_says_why_there_is_none(deployment):
    runs = deployment.client.runs
    with pytest.raises(NotFoundError, match="batch 3 resolved 4 samples") as caught:
        await runs.lineage("runs/letters-1", rollout="3-17")
    assert caught.value.reason == "SAMPLE_NOT_FOUND" and "run samples" in (caught.value.remedy or "")
    with pytest.raises(NotFoundError, match="no batch 99 is committed, the newest is 4"):
        await runs.lineage("runs/letters-1", rollout="99-0")
    with pytest.raises(InvalidSpecError, match="12-3"):
        await runs.lineage("runs/letters-1", rollout="twelve")
    with pytest.raises(NotFoundError, match=r"no policy version 77: the newest .* is 5") as caught:
        await runs.lineage("runs/letters-1", version=77)
    assert "from 0, the start policy, to 5" in (caught.value.remedy or "")


async def test_a_batch_that_cannot_be_read_is_told(deployment):
    store, names = deployment.writer.store, deployment.writer.names
    key = next(info.key for info in store.list(f"{names.root}rollouts/00000001/"))
    store.put(key, b"garbage")
    told: list[str] = []
    found = await deployment.client.runs.rollouts("runs/letters-1", on_note=told.append)
    assert len(found["id"]) == 4 * (STEPS - 1)
    assert any("batch 1 are missing" in each for each in told)


async def test_a_log_that_cannot_be_read_is_no_short_list(deployment, monkeypatch):
    names = deployment.writer.names
    deployment.writer.store.put(names.batch_header(STEPS), b"garbage")  # hides its own batch
    page = await call(deployment.stub.ListRollouts, rs.ListRolloutsRequest(parent="runs/letters-1"))
    assert [each.step for each in page.unreadable] == [STEPS] and page.total_size == 4 * STEPS
    key = next(info.key for info in deployment.writer.store.list(f"{names.root}events/"))
    deployment.writer.store.put(key, b"garbage")
    with pytest.raises(UnavailableError, match="cannot be read now") as caught:
        await deployment.client.runs.metrics("runs/letters-1")
    assert caught.value.reason == "LOG_UNREADABLE"


async def test_lists_need_the_token_that_every_call_needs(redis_url, tmp_path, monkeypatch):
    tokens = tmp_path / "tokens"
    tokens.write_text(token_line(new_token(), "somebody") + "\n")
    monkeypatch.setenv("MILLRACE_TOKENS_FILE", str(tokens))
    monkeypatch.setenv("MILLRACE_SCRATCH_DIR", str(tmp_path / "scratch"))
    (tmp_path / "store").mkdir()
    settings = Settings(
        redis_url=redis_url, store_url=(tmp_path / "store").as_uri(), prefix=f"lists{free_port()}",
        listen="127.0.0.1:0", drain_s=0.0, grace_s=1.0,
    )  # fmt: skip
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(serve_orchestrator(settings, on_started=started.set_result, handle_signals=False))
    await asyncio.wait({started, running}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    async with Client(f"127.0.0.1:{started.result()}", access=ClientAccess.plain()) as client:
        for ask in (client.runs.get, client.runs.metrics, client.runs.rollouts):
            with pytest.raises(UnauthenticatedError):
                await ask("runs/letters-1")
        with pytest.raises(UnauthenticatedError):
            await client.runs.lineage("runs/letters-1", version=0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
