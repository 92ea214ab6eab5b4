"""The client against a small in-process RunService: a second implementation of the protocol."""

import asyncio
import json
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from millrace.client import Client, SyncClient, state_name
from millrace.errors import (
    HELD_UP,
    AlreadyExistsError,
    InvalidSpecError,
    InvalidStateError,
    NotFoundError,
    RefusedError,
    UnavailableError,
    Violation,
)
from millrace.rpc.status import abort
from millrace.v1 import checkpoint_pb2, event_pb2, run_pb2
from millrace.v1 import run_service_pb2 as rs
from millrace.v1.run_service_pb2_grpc import RunServiceServicer
from millrace_testing.runlog.fake_runs import served, serving


def state(new: run_pb2.RunState) -> event_pb2.Event:
    return event_pb2.Event(state_changed=event_pb2.StateChanged(new_state=new))


def step(number: int) -> event_pb2.Event:
    return event_pb2.Event(step_completed=event_pb2.StepCompleted(step=number))


class FakeRuns(RunServiceServicer):
    """Keeps runs in a dict; `script` is the event log; `break_after` breaks the stream once, after so many events."""

    def __init__(self) -> None:
        self.runs: dict[str, run_pb2.Run] = {}
        self.by_request: dict[str, run_pb2.Run] = {}
        self.script: list[event_pb2.Event] = []
        self.break_after: list[int] = []
        self.afters: list[str] = []
        self.how = "abort"
        self.pause_s = 0.0
        """Before each event."""

    async def CreateRun(self, request, context):
        if request.request_id in self.by_request:
            return rs.CreateRunResponse(run=self.by_request[request.request_id])
        if request.config_json == "{}":
            violations = [
                Violation(field="orchestrator.env", message="is missing", source="a.toml"),
                Violation(field="max_steps", value="-1", message="must be >= 1"),
            ]
            await abort(context, InvalidSpecError(violations))
        if f"runs/{request.run_id}" in self.runs:
            await abort(context, AlreadyExistsError(f"run {request.run_id} exists", reason="RUN_ID_TAKEN", remedy="x"))
        run = run_pb2.Run(name=f"runs/{request.run_id or 'made-up'}", uid="u1", config_json=request.config_json)
        if not request.validate_only:
            self.runs[run.name] = run
            self.by_request[request.request_id] = run
        return rs.CreateRunResponse(run=run)

    async def GetRun(self, request, context):
        if request.name not in self.runs:
            await abort(context, NotFoundError(f"no run {request.name}", reason="RUN_NOT_FOUND"))
        return rs.GetRunResponse(run=self.runs[request.name])

    async def ListRuns(self, request, context):
        names = list(reversed(self.runs))
        begin = int(request.page_token or 0)
        page = names[begin : begin + min(request.page_size, 2)]
        end = begin + len(page)
        token = str(end) if end < len(names) else ""
        return rs.ListRunsResponse(runs=[self.runs[name] for name in page], next_page_token=token)

    async def CancelRun(self, request, context):
        run = self.runs[request.name]
        run.state = run_pb2.RUN_STATE_CANCELLED
        return rs.CancelRunResponse(run=run)

    async def PauseRun(self, request, context):
        run = self.runs[request.name]
        run.state = run_pb2.RUN_STATE_PAUSED
        run.error.message = request.reason  # shows the test what was sent
        return rs.PauseRunResponse(run=run)

    async def ResumeRun(self, request, context):
        run = self.runs[request.name]
        run.state = run_pb2.RUN_STATE_QUEUED
        return rs.ResumeRunResponse(run=run)

    async def WatchRun(self, request, context) -> AsyncIterator[rs.WatchRunResponse]:
        self.afters.append(request.after)
        begin = int(request.after or 0)
        limit = self.break_after.pop(0) if self.break_after else None
        yield rs.WatchRunResponse()  # a heartbeat is no event
        for number, event in enumerate(self.script[begin:], begin + 1):
            if limit is not None and number > limit:
                if self.how == "abort":
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
                if self.how == "held up":
                    error = RefusedError("the disk is full", reason=HELD_UP, metadata={"cause": "DISK_FULL"})
                    await abort(context, error)
                if self.how == "silent":
                    await asyncio.sleep(30)
                return
            answer = event_pb2.Event()
            answer.CopyFrom(event)
            answer.cursor = str(number)
            await asyncio.sleep(self.pause_s)
            yield rs.WatchRunResponse(event=answer)

    async def ListCheckpoints(self, request, context):
        if not request.page_token:
            first = checkpoint_pb2.Checkpoint(name=f"{request.parent}/checkpoints/1", step=1)
            return rs.ListCheckpointsResponse(checkpoints=[first], next_page_token="x")
        second = checkpoint_pb2.Checkpoint(name=f"{request.parent}/checkpoints/2", step=2)
        return rs.ListCheckpointsResponse(checkpoints=[second])

    async def ExplainRun(self, request, context):
        wait = event_pb2.Wait(owner="trainer-0", reason="batch 1", waits_on="orchestrator", age_seconds=3)
        return rs.ExplainRunResponse(waits=[wait], summary="trainer waits for batch 1")


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeRuns, str]]:
    servicer = FakeRuns()
    async with served(servicer) as address:
        yield servicer, address


async def test_create_get_cancel_and_idempotence(fake):
    servicer, address = fake
    async with Client(address) as client:
        first = await client.runs.create('{"a":1}', run_id="x", request_id="r1")
        again = await client.runs.create('{"a":1}', run_id="x", request_id="r1")
        assert first == again and len(servicer.runs) == 1
        assert (await client.runs.get("runs/x")).uid == "u1"
        assert (await client.runs.cancel("runs/x")).state == run_pb2.RUN_STATE_CANCELLED
        checked = await client.runs.create('{"b":1}', run_id="dry", validate_only=True)
        assert checked.name == "runs/dry" and "runs/dry" not in servicer.runs


async def test_pause_and_resume(fake):
    servicer, address = fake
    servicer.runs["runs/x"] = run_pb2.Run(name="runs/x", state=run_pb2.RUN_STATE_RUNNING)
    async with Client(address) as client:
        paused = await client.runs.pause("runs/x", reason="lunch")
        assert (paused.state, paused.error.message) == (run_pb2.RUN_STATE_PAUSED, "lunch")
        assert (await client.runs.resume("runs/x")).state == run_pb2.RUN_STATE_QUEUED


async def test_errors_are_ours(fake):
    _, address = fake
    async with Client(address) as client:
        with pytest.raises(InvalidSpecError) as caught:
            await client.runs.create("{}")
        assert [v.field for v in caught.value.violations] == ["orchestrator.env", "max_steps"]
        assert caught.value.violations[1].value == "-1"
        with pytest.raises(NotFoundError):
            await client.runs.get("runs/nobody")
        await client.runs.create('{"a":1}', run_id="x")
        with pytest.raises(AlreadyExistsError):
            await client.runs.create('{"a":1}', run_id="x")


async def test_list_follows_pages_and_limit(fake):
    _, address = fake
    async with Client(address) as client:
        for number in range(5):
            await client.runs.create('{"a":1}', run_id=f"r{number}")
        assert [run.name for run in await client.runs.list()] == [f"runs/r{n}" for n in (4, 3, 2, 1, 0)]
        assert len(await client.runs.list(limit=3)) == 3
        assert [c.step for c in await client.runs.checkpoints("runs/r0")] == [1, 2]
        assert (await client.runs.explain("runs/r0")).waits[0].waits_on == "orchestrator"


@pytest.mark.parametrize("how", ["abort", "end", "silent"])
async def test_watch_resumes_with_the_last_cursor(fake, how):
    servicer, address = fake
    servicer.how = how
    servicer.script = [state(run_pb2.RUN_STATE_RUNNING), *map(step, range(4)), state(run_pb2.RUN_STATE_SUCCEEDED)]
    servicer.break_after = [2, 4]
    servicer.runs["runs/x"] = run_pb2.Run(name="runs/x", state=run_pb2.RUN_STATE_RUNNING)
    heard: list[str] = []
    async with Client(address) as client:
        events = client.runs.watch("runs/x", on_reconnect=lambda e, s: heard.append(e.reason), silence_s=0.5)
        cursors = [event.cursor async for event in events]
    assert cursors == ["1", "2", "3", "4", "5", "6"]
    assert servicer.afters == ["", "2", "4"]
    assert len(heard) == 2


async def test_watch_behind_the_end_of_an_ended_run_ends(fake):
    servicer, address = fake
    servicer.script = [state(run_pb2.RUN_STATE_SUCCEEDED)]
    servicer.runs["runs/x"] = run_pb2.Run(name="runs/x", state=run_pb2.RUN_STATE_SUCCEEDED)
    async with Client(address) as client:
        assert [event async for event in client.runs.watch("runs/x", after="1")] == []


async def test_replay_does_not_follow(fake):
    servicer, address = fake
    servicer.script = [step(0), step(1), step(2)]
    servicer.break_after = [2]
    servicer.how = "silent"
    servicer.runs["runs/x"] = run_pb2.Run(name="runs/x", state=run_pb2.RUN_STATE_RUNNING)
    async with Client(address) as client:
        assert [event.cursor for event in await client.runs.replay("runs/x", idle_s=0.3)] == ["1", "2"]


async def test_watch_gives_up_when_nobody_answers():
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
            async for _ in client.runs.watch("runs/x", give_up_s=0.0):
                pass


def test_sync_facade():
    """The synchronous client against a server in another thread's loop."""
    servicer = FakeRuns()
    servicer.script = [step(0), state(run_pb2.RUN_STATE_SUCCEEDED)]
    with serving(servicer) as address, SyncClient(address) as client:
        assert client.runs.create('{"a":1}', run_id="x").name == "runs/x"
        assert [e.cursor for e in client.runs.watch("runs/x")] == ["1", "2"]
        assert [r.name for r in client.runs.list()] == ["runs/x"]


async def test_a_config_is_a_dict_a_file_or_several(fake, tmp_path):
    servicer, address = fake
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("max_steps = 3\nasync_level = 0\n[orchestrator]\nrollouts_per_example = 8\nbatch_size = 16\n")
    with first.open("a") as file:
        file.write("[[orchestrator.env]]\nid = 'reverse-text'\n")
    second.write_text("max_steps = 5\n")
    async with Client(address) as client:
        sent = (await client.runs.create({"max_steps": 2}, run_id="a")).config_json
        assert json.loads(sent) == {"max_steps": 2}, "the server fills in what a dict leaves out"
        sent = json.loads((await client.runs.create([first, second], run_id="b")).config_json)
        assert (sent["max_steps"], sent["async_level"]) == (5, 0), "later files win"
        second.write_text("max_stepps = 5\nseq_len = -1\n")
        with pytest.raises(InvalidSpecError) as caught:
            await client.runs.create([first, second], run_id="c")
        assert {v.source for v in caught.value.violations} == {f"{second}:1", f"{second}:2"}
    assert "runs/c" not in servicer.runs


async def test_states_may_be_named(fake):
    _, address = fake
    async with Client(address) as client:
        await client.runs.list(states=["RUNNING", run_pb2.RUN_STATE_QUEUED])
        with pytest.raises(ValueError, match="RUN_STATE_RUNING"):
            await client.runs.list(states=["RUNING"])
    assert state_name(run_pb2.RUN_STATE_RUNNING) == "RUNNING"


async def test_wait_tells_states_and_returns_the_run(fake):
    servicer, address = fake
    servicer.script = [state(run_pb2.RUN_STATE_RUNNING), step(0), state(run_pb2.RUN_STATE_SUCCEEDED)]
    servicer.runs["runs/x"] = run_pb2.Run(name="runs/x", state=run_pb2.RUN_STATE_SUCCEEDED)
    said: list[str] = []
    async with Client(address) as client:
        assert (await client.runs.wait("runs/x", on_note=said.append)).name == "runs/x"
    assert said == ["RUNNING", "SUCCEEDED"]


async def test_wait_raises_the_reason_of_a_run_that_failed(fake):
    servicer, address = fake
    servicer.script = [state(run_pb2.RUN_STATE_FAILED)]
    error = run_pb2.RunError(reason="ROLLOUTS_FAILED", message="the reward is NaN")
    servicer.runs["runs/x"] = run_pb2.Run(name="runs/x", state=run_pb2.RUN_STATE_FAILED, error=error)
    async with Client(address) as client:
        with pytest.raises(InvalidStateError, match="FAILED: the reward is NaN") as caught:
            await client.runs.wait("runs/x")
    assert caught.value.reason == "ROLLOUTS_FAILED"


async def test_wait_has_a_deadline(fake):
    servicer, address = fake
    servicer.how = "silent"
    servicer.script, servicer.break_after = [state(run_pb2.RUN_STATE_RUNNING)], [1]
    servicer.runs["runs/x"] = run_pb2.Run(name="runs/x", state=run_pb2.RUN_STATE_RUNNING)
    async with Client(address) as client:
        with pytest.raises(TimeoutError):
            await client.runs.wait("runs/x", timeout_s=0.5)


async def test_replay_of_an_ended_run_waits_for_what_comes_late(fake):
    servicer, address = fake
    servicer.script, servicer.pause_s = [step(0), step(1), state(run_pb2.RUN_STATE_SUCCEEDED)], 0.5
    servicer.runs["runs/x"] = run_pb2.Run(name="runs/x", state=run_pb2.RUN_STATE_SUCCEEDED)
    async with Client(address) as client:
        found = await client.runs.replay("runs/x", idle_s=0.1)
    assert [event.cursor for event in found] == ["1", "2", "3"]


async def test_replay_of_a_run_that_trains_ends_behind_a_step_that_is_new(fake):
    servicer, address = fake
    servicer.script, servicer.pause_s = [step(number) for number in range(12)], 0.3
    servicer.runs["runs/x"] = run_pb2.Run(name="runs/x", state=run_pb2.RUN_STATE_RUNNING)
    servicer.runs["runs/x"].progress.step = 2
    async with Client(address) as client:
        found = await client.runs.replay("runs/x", idle_s=5.0)
    assert [event.step_completed.step for event in found] == [0, 1, 2]


async def test_watch_of_a_run_that_is_held_up_is_not_tried_again(fake):
    servicer, address = fake
    servicer.how, servicer.script, servicer.break_after = "held up", [step(0), step(1)], [1]
    servicer.runs["runs/x"] = run_pb2.Run(name="runs/x", state=run_pb2.RUN_STATE_RUNNING)
    seen: list[str] = []
    async with Client(address) as client:
        with pytest.raises(RefusedError, match="the disk is full") as caught:
            seen += [event.cursor async for event in client.runs.watch("runs/x")]
    assert caught.value.reason == HELD_UP and caught.value.metadata["cause"] == "DISK_FULL"
    assert len(servicer.afters) == 1


async def test_replay_says_that_the_server_was_lost(fake):
    servicer, address = fake
    servicer.how, servicer.break_after = "end", [1] + [0] * 50
    servicer.script = [step(0), step(1)]
    servicer.runs["runs/x"] = run_pb2.Run(name="runs/x", state=run_pb2.RUN_STATE_RUNNING)
    async with Client(address) as client:
        with pytest.raises(UnavailableError, match="ended the stream"):
            await client.runs.replay("runs/x", idle_s=1.0)
