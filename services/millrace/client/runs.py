"""Runs: create, get, list, cancel, pause, resume, fork, audit, watch, explain, checkpoints, and data of their logs."""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.backoff import Backoff
from millrace.config import EvalRunConfig, RLConfig
from millrace.config.load import load
from millrace.errors import HELD_UP, InvalidSpecError, InvalidStateError, MillraceError, UnavailableError, Violation
from millrace.rpc.channel import call, stream
from millrace.runlog.run_status import is_terminal, state_name
from millrace.v1 import audit_pb2, checkpoint_pb2, event_pb2, metric_pb2, rollout_pb2, run_pb2
from millrace.v1 import run_service_pb2 as rs
from millrace.v1.run_service_pb2_grpc import RunServiceStub

CREATE_TIMEOUT_S = 30.0
CHECK_TIMEOUT_S = 330.0  # longer than the server gives an environment to load
CALL_TIMEOUT_S = 10.0
AUDIT_TIMEOUT_S = 3600.0  # reads everything that a run has written
USAGE_TIMEOUT_S = 60.0
DELETE_TIMEOUT_S = 3600.0  # 1,000 objects a request
FORK_TIMEOUT_S = 1800.0  # copies a checkpoint and batches from store to store
SILENCE_S = 45.0  # the server sends a heartbeat every 15 s, so three are missing
GIVE_UP_S = 120.0
WHY_QUEUED_PERIOD_S = 2.0
_BACKOFF = Backoff(0.2, 5.0, spread=(0.7, 1.3))
_PAGE_SIZE = 200
LIST_TIMEOUT_S = 35.0  # longer than the server gives its reader
READ_LOG_S = 1800.0  # an index of a million rollouts takes minutes
_LIST_PAGE_SIZE = 1000
_INDEX_GROWING = "INDEX_GROWING"

OnReconnect = Callable[[UnavailableError, float], None]
RunStateLike = run_pb2.RunState | str
"""A state, or its name: `"RUNNING"` for RUN_STATE_RUNNING."""

# Lists of messages as columns of plain values: `pandas.DataFrame(columns)` takes them as they are.

Columns = dict[str, list[Any]]
"""Lists of equal length by name; None is a missing value."""


def metric_columns(steps: Sequence[metric_pb2.StepMetrics]) -> Columns:
    """Return columns with a row per step: `step`, then the metrics by name; None where a step lacks one."""
    names = sorted({name for each in steps for name in each.values})
    values = [dict(each.values) for each in steps]
    return {"step": [each.step for each in steps]} | {name: [row.get(name) for row in values] for name in names}


def rollout_columns(rollouts: Sequence[rollout_pb2.Rollout]) -> Columns:
    """Return columns with a row per rollout: `id`, then the fields of the message.

    None where an optional one is not set.
    """
    columns: Columns = {"id": [each.name.rpartition("/")[2] for each in rollouts]}
    for field in rollout_pb2.Rollout.DESCRIPTOR.fields:
        if field.name != "name":
            is_there = (lambda each, name=field.name: each.HasField(name)) if field.has_presence else lambda each: True
            columns[field.name] = [getattr(each, field.name) if is_there(each) else None for each in rollouts]
    return columns


# The config of a run as users have it: a dict, TOML files, or JSON text.

RunConfigLike = str | Mapping[str, Any] | Path | Sequence[Path]
"""JSON text, nested keys, a TOML file, or several of which later ones win."""


def config_json(config: RunConfigLike, *, kind: run_pb2.RunKind) -> str:
    """Return a run's config as the JSON text for the server; `kind` says which schema files are checked by.

    `config` is JSON text, a dict of nested keys, a TOML file, or several files of which later ones win. Raises
    InvalidSpecError with every mistake in a file and its line. JSON texts and dicts are checked by the server alone. No
    environment variable of this process is read.
    """
    if isinstance(config, str):
        return config
    if isinstance(config, Mapping):
        return json.dumps(config)
    files = [config] if isinstance(config, Path) else list(config)
    model = EvalRunConfig if kind == run_pb2.RUN_KIND_EVAL else RLConfig
    arguments = [word for file in files for word in ("@", str(file))]
    # Without variables: those of the machine that submits must not change what a run is.
    return load(model, arguments, {}).config.resolved_json()


class RunsClient:
    """The RPCs of RunService as methods. `name` is `runs/{run}` or a uid everywhere."""

    def __init__(self, stub: RunServiceStub, *, to: str) -> None:
        """Take the stub of a connected channel; `to` names the server in messages."""
        self._stub = stub
        self._to = to

    async def create(
        self,
        config: RunConfigLike,
        *,
        run_id: str = "",
        kind: run_pb2.RunKind = run_pb2.RUN_KIND_RL,
        request_id: str | None = None,
        validate_only: bool = False,
        check_environments: bool = False,
        labels: Mapping[str, str] | None = None,
    ) -> run_pb2.Run:
        """Queue a run and return it; with `validate_only` the config is checked and nothing queued.

        `config` is JSON text, a dict of nested keys, a TOML file, or several files of which later ones win. `run_id` is
        the run's name, "" for one that the server makes. The same `request_id` (a UUID; a new one if None) with the
        same config returns the first answer. With `check_environments` the environments are loaded first, which may
        take minutes; InvalidStateError names one that fails. Raises InvalidSpecError with every violation,
        AlreadyExistsError if `run_id` is taken.
        """
        request = rs.CreateRunRequest(
            run_id=run_id,
            kind=kind,
            config_json=config_json(config, kind=kind),
            request_id=request_id or str(uuid.uuid4()),
            validate_only=validate_only,
            check_environments=check_environments,
            labels=dict(labels or {}),
        )
        timeout_s = CHECK_TIMEOUT_S if check_environments else CREATE_TIMEOUT_S
        response = await call(self._stub.CreateRun, request, timeout_s=timeout_s, to=self._to)
        return response.run

    async def get(self, name: str) -> run_pb2.Run:
        """Return the run of this name, as it is now; raise NotFoundError if there is none."""
        response = await call(self._stub.GetRun, rs.GetRunRequest(name=name), timeout_s=CALL_TIMEOUT_S, to=self._to)
        return response.run

    async def list(
        self, *, states: Sequence[RunStateLike] = (), limit: int = 0, tenant: str = ""
    ) -> Sequence[run_pb2.Run]:
        """Return runs in these states (all if none is given), newest first; with `tenant` only those of that tenant.

        At most `limit` are returned, over as many pages as necessary; 0 is no limit.
        """
        state_names: list[run_pb2.RunState | str] = [f"RUN_STATE_{s}" if isinstance(s, str) else s for s in states]
        runs: list[run_pb2.Run] = []
        token = ""
        while True:
            size = min(_PAGE_SIZE, limit - len(runs)) if limit else _PAGE_SIZE
            request = rs.ListRunsRequest(page_size=size, page_token=token, states=state_names, tenant=tenant)
            response = await call(self._stub.ListRuns, request, timeout_s=CALL_TIMEOUT_S, to=self._to)
            runs.extend(response.runs)
            token = response.next_page_token
            if not token or (limit and len(runs) >= limit):
                return runs[:limit] if limit else runs

    async def cancel(self, name: str, *, reason: str = "", request_id: str | None = None) -> run_pb2.Run:
        """Ask a run to end as CANCELLED, for a reason that its log records.

        The returned run may still show the state before. Calls with the same `request_id` (a UUID; a new one if None)
        count once.
        """
        request = rs.CancelRunRequest(name=name, reason=reason, request_id=request_id or str(uuid.uuid4()))
        response = await call(self._stub.CancelRun, request, timeout_s=CALL_TIMEOUT_S, to=self._to)
        return response.run

    async def pause(self, name: str, *, reason: str = "", request_id: str | None = None) -> run_pb2.Run:
        """Ask a run to stop at a step boundary and to release its workers.

        The returned run may still show the state before. The run's log records the reason. Calls with the same
        `request_id` (a UUID; a new one if None) count once. Raises InvalidStateError for a run that has ended or is
        about to end. Pausing a paused run changes nothing.
        """
        request = rs.PauseRunRequest(name=name, reason=reason, request_id=request_id or str(uuid.uuid4()))
        response = await call(self._stub.PauseRun, request, timeout_s=CALL_TIMEOUT_S, to=self._to)
        return response.run

    async def resume(
        self,
        name: str,
        *,
        retain_batches: int | None = None,
        retain_policies: int | None = None,
        request_id: str | None = None,
    ) -> run_pb2.Run:
        """Let a paused or FAILED run go on as soon as a trainer is free; a run in progress goes on as it does.

        `retain_batches` and `retain_policies` take the place of the config's keys from here on: 0 keeps everything,
        None leaves what was set before. The same `request_id` (a UUID; a new one if None) counts once. Raises
        InvalidStateError for a run that has ended otherwise.
        """
        request = rs.ResumeRunRequest(
            name=name,
            request_id=request_id or str(uuid.uuid4()),
            retain_batches=retain_batches,
            retain_policies=retain_policies,
        )
        response = await call(self._stub.ResumeRun, request, timeout_s=CALL_TIMEOUT_S, to=self._to)
        return response.run

    async def fork(
        self,
        name: str,
        *,
        step: int,
        run_id: str = "",
        config_json: str = "",
        request_id: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> run_pb2.Run:
        """Make a new run that continues from `step` of the run `name`, and return the new run.

        `run_id` is the new run's name, "" for one that the server makes. `config_json` is its config; empty means the
        config of the run `name`. Raises InvalidStateError, with the steps that are kept, if `step` is not kept. A call
        with the `request_id` of an interrupted one completes its copy.
        """
        request = rs.ForkRunRequest(
            name=name,
            step=step,
            run_id=run_id,
            config_json=config_json,
            request_id=request_id or str(uuid.uuid4()),
            labels=dict(labels or {}),
        )
        response = await call(self._stub.ForkRun, request, timeout_s=FORK_TIMEOUT_S, to=self._to)
        return response.run

    async def audit(self, name: str, *, timeout_s: float = AUDIT_TIMEOUT_S) -> audit_pb2.AuditReport:
        """Have the server check the promises of a run against its whole log, within `timeout_s` seconds.

        Return the findings.
        """
        request = rs.AuditRunRequest(name=name)
        response = await call(self._stub.AuditRun, request, timeout_s=timeout_s, to=self._to)
        return response.report

    async def delete(
        self, name: str, *, even_needed: bool = False, validate_only: bool = False, timeout_s: float = DELETE_TIMEOUT_S
    ) -> rs.DeleteRunResponse:
        """Delete every object of an ended run, for good, and return what the run had; with `validate_only` nothing is
        deleted.

        A deletion whose answer was lost goes on when it is asked for again. Raises InvalidStateError if the run has not
        ended, if a process still holds it, or if forks need it and `even_needed` is false.
        """
        request = rs.DeleteRunRequest(name=name, even_needed=even_needed, validate_only=validate_only)
        return await call(self._stub.DeleteRun, request, timeout_s=timeout_s, to=self._to)

    async def usage(self, *, tenant: str = "") -> Sequence[rs.TenantUsage]:
        """Return what runs have used, by tenant: of all that the token opens, or of one tenant.

        Raises UnavailableError (USAGE_GROWING) while there are more runs than could be read: ask again.
        """
        request = rs.ListUsageRequest(tenant=tenant)
        return (await call(self._stub.ListUsage, request, timeout_s=USAGE_TIMEOUT_S, to=self._to)).tenants

    async def explain(self, name: str) -> rs.ExplainRunResponse:
        """Return what every service of the run waits for, longest first, and a summary with the chain of waits."""
        request = rs.ExplainRunRequest(name=name)
        return await call(self._stub.ExplainRun, request, timeout_s=CALL_TIMEOUT_S, to=self._to)

    async def checkpoints(self, name: str) -> Sequence[checkpoint_pb2.Checkpoint]:
        """Return all checkpoints of a run, oldest first."""
        found: list[checkpoint_pb2.Checkpoint] = []
        token = ""
        while True:
            request = rs.ListCheckpointsRequest(parent=name, page_size=_PAGE_SIZE, page_token=token)
            response = await call(self._stub.ListCheckpoints, request, timeout_s=CALL_TIMEOUT_S, to=self._to)
            found.extend(response.checkpoints)
            token = response.next_page_token
            if not token:
                return found

    async def metrics(
        self, name: str, *, names: Sequence[str] = (), on_note: Callable[[str], None] | None = None
    ) -> Columns:
        """Return a run's metrics by step as columns, for `pandas.DataFrame`; with `names` only the metrics of these
        names.

        `on_note` gets the server's progress while it reads a log for the first time.
        """
        steps: list[metric_pb2.StepMetrics] = []
        request = rs.ListMetricsRequest(parent=name, page_size=_LIST_PAGE_SIZE, names=names)
        while True:
            response = await self._read_log(self._stub.ListMetrics, request, on_note)
            steps.extend(response.steps)
            request.page_token = response.next_page_token
            if not request.page_token:
                return metric_columns(steps)

    async def rollouts(
        self,
        name: str,
        *,
        order_by: str = "",
        limit: int = 0,
        on_note: Callable[[str], None] | None = None,
        **filters: str | float,
    ) -> Columns:
        """Return a run's rollouts as columns, for `pandas.DataFrame`.

        At most `limit` are returned, over as many pages as necessary; 0 is no limit. `filters` are those of
        `ListRolloutsRequest`, such as `env="letters", min_reward=0.5`; `order_by` is such as "reward desc", "" for the
        order of the log. `on_note` gets batches that cannot be read, and the server's progress while it reads a log for
        the first time.
        """
        found: list[rollout_pb2.Rollout] = []
        texts = {key: str(value) for key, value in filters.items()}
        request = rs.ListRolloutsRequest(parent=name, filter=texts, order_by=order_by, page_size=_LIST_PAGE_SIZE)
        while True:
            if limit:
                request.page_size = min(_LIST_PAGE_SIZE, limit - len(found))
            response = await self._read_log(self._stub.ListRollouts, request, on_note)
            # Every page repeats the unreadable batches: they are reported with the first.
            if not request.page_token and on_note is not None:
                for each in response.unreadable:
                    on_note(f"the rollouts of batch {each.step} are missing: {each.problem}")
            found.extend(response.rollouts)
            request.page_token = response.next_page_token
            if not request.page_token or (limit and len(found) >= limit):
                return rollout_columns(found)

    async def lineage(
        self,
        name: str,
        *,
        rollout: str | None = None,
        version: int | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> rs.GetLineageResponse:
        """Return what made a rollout (its id, such as `12-3`) or a policy version, and what was made from it.

        Exactly one of the two must be given. `on_note` gets the server's progress while it reads a log for the first
        time. Raises NotFoundError with the reason if there is none.
        """
        request = rs.GetLineageRequest(name=name, rollout=rollout, version=version)
        if rollout is not None and version is not None:
            wrong = Violation(field="rollout, version", message="exactly one of them must be given")
            raise InvalidSpecError([wrong], remedy="leave one out")
        return await self._read_log(self._stub.GetLineage, request, on_note)

    async def _read_log(self, method: Any, request: Any, on_note: Callable[[str], None] | None) -> Any:
        """Call a method that reads a run's log, and return the answer.

        While the server reads the log for the first time, the call is repeated, and `on_note` gets the server's
        progress. Raises the server's error, and UnavailableError after `READ_LOG_S` seconds.
        """
        begun, num_asked = time.monotonic(), 0
        # unregistered wait: reports the server's progress to its caller (`on_note`), and gives up after READ_LOG_S
        while True:
            try:
                return await call(method, request, timeout_s=LIST_TIMEOUT_S, to=self._to)
            except UnavailableError as error:
                if error.reason != _INDEX_GROWING or time.monotonic() - begun > READ_LOG_S:
                    raise
                if on_note is not None:
                    on_note(error.message)
            num_asked += 1
            await asyncio.sleep(_BACKOFF.after(num_asked))

    async def watch(
        self,
        name: str,
        *,
        after: str = "",
        on_reconnect: OnReconnect | None = None,
        give_up_s: float = GIVE_UP_S,
        silence_s: float = SILENCE_S,
    ) -> AsyncGenerator[event_pb2.Event, None]:
        """Yield every event of a run after the cursor `after` ("": all), then new ones as they come, up to the terminal
        state.

        The state FAILED does not end the stream if the run was reopened since. A lost server is called again with the
        last cursor, so that no event is missed or comes twice; `on_reconnect` gets the error and the seconds until the
        next try. A connection that is silent for `silence_s` seconds counts as lost. Raises UnavailableError after
        `give_up_s` seconds without a message from any server, and RefusedError (RUN_HELD_UP) once the run has made no
        progress for a minute because something that it needs refuses.
        """
        cursor = after
        heard = time.monotonic()
        num_lost = 0
        # unregistered wait: reports every lost server to its caller (`on_reconnect`), and gives up after `give_up_s`
        while True:
            try:
                async with contextlib.aclosing(self._watch_once(name, cursor, silence_s)) as responses:
                    async for response in responses:
                        # Empty messages count, too: they show that the server answers.
                        heard, num_lost = time.monotonic(), 0
                        if not response.HasField("event"):
                            continue
                        cursor = response.event.cursor or cursor
                        yield response.event
                        if await self._is_end(name, response.event):
                            return
                # The server may end the stream although the terminal event did not come: the cursor was after it.
                if is_terminal((await self.get(name)).state):
                    return
                lost = UnavailableError(f"{self._to} ended the stream of {name}", reason="STREAM_ENDED")
            except UnavailableError as error:
                if error.reason == HELD_UP:
                    raise
                lost = error
            silent_s = time.monotonic() - heard
            if silent_s > give_up_s:
                raise lost
            num_lost += 1
            delay_s = _BACKOFF.after(num_lost)
            if on_reconnect is not None:
                on_reconnect(lost, delay_s)
            await asyncio.sleep(delay_s)

    async def wait(
        self, name: str, *, on_note: Callable[[str], None] | None = None, timeout_s: float | None = None
    ) -> run_pb2.Run:
        """Wait for a run's end and return it; `on_note` gets states, and the reason why a run is queued.

        Raises InvalidStateError with the run's own reason if it does not end as SUCCEEDED, TimeoutError after
        `timeout_s` seconds (None: no limit), UnavailableError if no server answers for long, and RefusedError
        (RUN_HELD_UP) if something that the run needs refuses.
        """
        note, state = on_note or (lambda text: None), run_pb2.RUN_STATE_QUEUED
        queued = self.reporting_queued(name, note, is_queued=lambda: state == run_pb2.RUN_STATE_QUEUED)
        async with asyncio.timeout(timeout_s), queued, contextlib.aclosing(self.watch(name)) as events:
            async for event in events:
                if event.HasField("state_changed"):
                    state = event.state_changed.new_state
                    note(state_name(state))
        run = await self.get(name)
        if run.state != run_pb2.RUN_STATE_SUCCEEDED:
            raise InvalidStateError(
                f"{run.name} ended as {state_name(run.state)}"
                + (f": {run.error.message}" if run.error.message else ""),
                reason=run.error.reason or "RUN_NOT_SUCCEEDED",
                remedy=f"`millrace run why {run.name.removeprefix('runs/')}` says more",
            )
        return run

    @contextlib.asynccontextmanager
    async def reporting_queued(
        self, name: str, note: Callable[[str], None], *, is_queued: Callable[[], bool]
    ) -> AsyncGenerator[None, None]:
        """Call `note` during the block with the reason why the run is queued: at once, and again when it changes.

        The server is asked only while `is_queued` returns true.
        """
        reporter = asyncio.create_task(self._report_queued(name, note, is_queued), name="reason of a queued run")
        try:
            yield
        finally:
            reporter.cancel()
            await asyncio.gather(reporter, return_exceptions=True)

    async def _report_queued(self, name: str, note: Callable[[str], None], is_queued: Callable[[], bool]) -> None:
        """Ask the server again and again why the run is queued, and pass each new reason to `note`, until cancelled."""
        reported = ""
        # unregistered wait: reports the reasons of the server's wait, until its caller ends it
        while True:
            reason = await self._why_queued(name) if is_queued() else ""
            if reason and reason != reported:
                note(f"QUEUED: {reason}")
            reported = reason or reported
            await asyncio.sleep(WHY_QUEUED_PERIOD_S)

    async def _why_queued(self, name: str) -> str:
        """Return why the run is queued, in the server's words; "" if it is not queued, or no server answers."""
        try:
            # The events may be replayed only up to where the run was queued: the server knows its present state.
            if (await self.get(name)).state != run_pb2.RUN_STATE_QUEUED:
                return ""
            summary = (await self.explain(name)).summary
            return summary.removeprefix("queued: ") if summary.startswith("queued: ") else ""  # it has just begun
        except MillraceError:
            return ""

    async def replay(self, name: str, *, idle_s: float = 1.0) -> Sequence[event_pb2.Event]:
        """Return the events of a run so far: all events of an ended run, else those that come until `idle_s` seconds
        pass without one.

        Once the run has reached the step at which it was when this was called, a tenth of a second without an event
        suffices. Raises UnavailableError if the server is lost meanwhile.
        """
        found_run = await self.get(name)
        has_ended, num_steps = is_terminal(found_run.state), found_run.progress.step
        lost: list[UnavailableError] = []
        found: list[event_pb2.Event] = []
        events = self.watch(name, on_reconnect=lambda error, _: lost.append(error))
        async with contextlib.aclosing(events):
            while True:
                # The first event may take as long as a call; an ended run's stream is ended by the server.
                limit_s = GIVE_UP_S if has_ended else idle_s if found else CALL_TIMEOUT_S
                try:
                    async with asyncio.timeout(limit_s):
                        event = await anext(events)
                    found.append(event)
                    # An event shows that the connection is back: what was lost before does not count any more.
                    lost.clear()
                    if event.HasField("step_completed") and event.step_completed.step >= num_steps:
                        idle_s = min(idle_s, 0.1)
                except StopAsyncIteration:
                    return found
                except TimeoutError:
                    if lost:
                        raise lost[-1] from None
                    return found

    async def _is_end(self, name: str, event: event_pb2.Event) -> bool:
        """Return whether no event can follow this one.

        After FAILED the server is asked, because the run may have been reopened.
        """
        if not event.HasField("state_changed") or not is_terminal(event.state_changed.new_state):
            return False
        is_failed = event.state_changed.new_state == run_pb2.RUN_STATE_FAILED
        return not is_failed or is_terminal((await self.get(name)).state)

    async def _watch_once(self, name: str, after: str, silence_s: float) -> AsyncGenerator[rs.WatchRunResponse, None]:
        """Yield the responses of one call of WatchRun after the cursor `after`.

        Raises UnavailableError when none comes for `silence_s` seconds.
        """
        request = rs.WatchRunRequest(name=name, after=after)
        async with contextlib.aclosing(stream(self._stub.WatchRun, request, to=self._to)) as responses:  # type: ignore[type-var]
            while True:
                try:
                    async with asyncio.timeout(silence_s):
                        response = await anext(responses)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise UnavailableError(
                        f"{self._to} said nothing for {silence_s:g} s", reason="STREAM_SILENT"
                    ) from None
                yield response
