"""Lists of the API as columns: over all pages, in the order of the run, as pandas takes them."""

from collections.abc import AsyncIterator

import pytest

from millrace.client import Client, SyncClient
from millrace.client import runs as runs_module
from millrace.errors import InvalidSpecError, UnavailableError
from millrace.rpc.status import abort
from millrace.v1 import metric_pb2, rollout_pb2
from millrace.v1 import run_service_pb2 as rs
from millrace.v1.run_service_pb2_grpc import RunServiceServicer
from millrace_testing.runlog.fake_runs import served

STEPS = 5


class Lists(RunServiceServicer):
    """Pages of two; the first `num_growing` calls are refused, because the log is being read."""

    def __init__(self) -> None:
        self.num_growing = 0
        self.asked: list[rs.ListRolloutsRequest] = []

    async def ListMetrics(self, request, context):
        await self._grow(context)
        first = int(request.page_token or 0)
        steps = []
        for step in range(first, min(first + 2, STEPS)):
            values = {"reward/mean": step / 2} | ({"eval/a/reward/mean": 1.0} if step == 3 else {})
            wanted = {name: value for name, value in values.items() if not request.names or name in request.names}
            steps.append(metric_pb2.StepMetrics(step=step, values=wanted))
        token = str(first + 2) if first + 2 < STEPS else ""
        return rs.ListMetricsResponse(steps=steps, next_page_token=token)

    async def ListRollouts(self, request, context):
        await self._grow(context)
        kept = rs.ListRolloutsRequest()
        kept.CopyFrom(request)
        self.asked.append(kept)
        first = int(request.page_token or 0)
        end = min(first + min(2, request.page_size), STEPS)
        found = [
            rollout_pb2.Rollout(name=f"{request.parent}/rollouts/{n}-0", step=n, reward=n / 4 if n else None)
            for n in range(first, end)
        ]
        token = str(end) if end < STEPS else ""
        broken = [rollout_pb2.UnreadableBatch(step=9, problem="damaged")]
        return rs.ListRolloutsResponse(rollouts=found, next_page_token=token, total_size=STEPS, unreadable=broken)

    async def _grow(self, context):
        if self.num_growing:
            self.num_growing -= 1
            await abort(context, UnavailableError("1 of 3 batches of the run are read", reason="INDEX_GROWING"))


@pytest.fixture
async def lists() -> AsyncIterator[tuple[Lists, str]]:
    servicer = Lists()
    async with served(servicer) as address:
        yield servicer, address


async def test_metrics_of_all_pages_are_columns_of_one_length(lists):
    _, address = lists
    async with Client(address) as client:
        found = await client.runs.metrics("runs/x")
        assert found == {
            "step": [0, 1, 2, 3, 4],
            "reward/mean": [0.0, 0.5, 1.0, 1.5, 2.0],
            "eval/a/reward/mean": [None, None, None, 1.0, None],
        }
        assert sorted(await client.runs.metrics("runs/x", names=["reward/mean"])) == ["reward/mean", "step"]


async def test_rollouts_of_all_pages_and_their_limit(lists):
    servicer, address = lists
    told: list[str] = []
    async with Client(address) as client:
        found = await client.runs.rollouts(
            "runs/x", env="letters", min_reward=0.5, order_by="step", on_note=told.append
        )
        assert found["id"] == [f"{n}-0" for n in range(STEPS)] and found["reward"] == [None, 0.25, 0.5, 0.75, 1.0]
        assert dict(servicer.asked[0].filter) == {"env": "letters", "min_reward": "0.5"}
        assert told == ["the rollouts of batch 9 are missing: damaged"], "once, and not for every page"
        servicer.asked.clear()
        assert (await client.runs.rollouts("runs/x", limit=3))["step"] == [0, 1, 2]
        assert [each.page_size for each in servicer.asked] == [3, 1]


async def test_a_log_that_is_being_read_is_waited_for(lists, monkeypatch):
    servicer, address = lists
    servicer.num_growing = 7  # gRPC itself calls five times
    told: list[str] = []
    async with Client(address) as client:
        assert len((await client.runs.metrics("runs/x", on_note=told.append))["step"]) == STEPS
        assert told == ["1 of 3 batches of the run are read"]
        servicer.num_growing = 50
        monkeypatch.setattr(runs_module, "READ_LOG_S", 0.0)
        with pytest.raises(UnavailableError, match="1 of 3 batches"):
            await client.runs.metrics("runs/x")
        with pytest.raises(InvalidSpecError, match="exactly one"):
            await client.runs.lineage("runs/x", rollout="1-0", version=3)


def test_pandas_takes_the_columns_as_they_are(lists_in_thread):
    pandas = pytest.importorskip("pandas")
    with SyncClient(lists_in_thread) as client:
        metrics = pandas.DataFrame(client.runs.metrics("runs/x"))
        rollouts = pandas.DataFrame(client.runs.rollouts("runs/x"))
    assert metrics.shape == (STEPS, 3) and metrics["reward/mean"].sum() == 5.0
    assert metrics["eval/a/reward/mean"].dropna().index.tolist() == [3]
    assert rollouts["reward"].mean() == 0.625 and len(rollouts) == STEPS


@pytest.fixture
def lists_in_thread():
    from millrace_testing.runlog.fake_runs import serving

    with serving(Lists()) as address:  # type: ignore[arg-type]
        yield address
