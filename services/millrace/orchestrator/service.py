"""RunService: the public API over the runs of a deployment."""

import asyncio
import logging
import re
import time
from collections.abc import Collection
from dataclasses import replace
from functools import partial

import grpc

from millrace.algorithms import make_algorithms
from millrace.config import EvalRunConfig, RLConfig
from millrace.decoding import MAX_JSON_BYTES, Fields, decode_object
from millrace.errors import (
    AlreadyExistsError,
    CorruptObjectError,
    InvalidSpecError,
    InvalidStateError,
    LogGoneError,
    NotFoundError,
    UnavailableError,
    Violation,
)
from millrace.orchestrator import new_run
from millrace.orchestrator.beside import PAGE_DEFAULT, LogPlace, Readers, next_token, of_bounded_size, page
from millrace.orchestrator.catalog import EventFeed, RunCatalog, RunView
from millrace.orchestrator.intents import IntentCalls, check_intent
from millrace.orchestrator.manager import RunManager
from millrace.orchestrator.new_run import make_record, validate
from millrace.orchestrator.play.tasks import Sampler
from millrace.orchestrator.tenants import SeenRuns, UsageReader
from millrace.orchestrator.why import unanswered
from millrace.orchestrator.worker_checks import check_environments, require_env_images, require_loadable_loss
from millrace.orchestrator.workers import WorkerRegistry
from millrace.race import in_own_thread
from millrace.rpc.access import calling_tenant
from millrace.runlog.deletion import (
    begin_deletion,
    delete_run,
    find_tombstone,
    plan_deletion,
    require_unneeded,
)
from millrace.runlog.fork import copy_fork, plan_fork
from millrace.runlog.index import create_run, find_request
from millrace.runlog.names import Names, new_uid, within
from millrace.runlog.records.run_record import EVAL, RunRecord
from millrace.runlog.run_status import TERMINAL, is_terminal
from millrace.storage.base import newest_revision, require_checksum
from millrace.telemetry import waits
from millrace.v1 import checkpoint_pb2, run_pb2, run_service_pb2, run_service_pb2_grpc

logger = logging.getLogger(__name__)

HEARTBEAT_S = 15.0
"""Silence after which a watch stream sends an empty message, so that a dead path is seen."""
EXPLAIN_READ_S = 2.0
"""Longest look at the log for an explanation, which comes within 5 s in any case."""
READ_BLOCK_S = 1.0
"""Longest block of one read in a watch: how late a drain or a cancelled client is noticed."""
MAX_VALIDATIONS = 2
"""Configs that are checked at the same time, in threads; further ones wait."""
_CURSOR = re.compile(r"[0-9]{1,19}(-[0-9]{1,19})?")

_MOST_KEPT = 1 << 53
"""Largest number of steps or versions to keep: what JSON carries exactly."""


class RunServicer(run_service_pb2_grpc.RunServiceServicer):
    """The public API. Every method raises `millrace.errors`; the interceptor maps them."""

    def __init__(
        self,
        *,
        place: LogPlace,
        readers: Readers,
        catalog: RunCatalog,
        manager: RunManager,
        registry: WorkerRegistry,
        usage: UsageReader,
        owner: str,
        draining: asyncio.Event,
    ) -> None:
        """Make the public API over the parts of this orchestrator, which `owner` names.

        Watches end once `draining` is set.
        """
        self._redis = place.redis
        self._store = place.store
        self._prefix = place.prefix
        self._readers = readers
        self._catalog = catalog
        self._manager = manager
        self._registry = registry
        self._owner = owner
        self._draining = draining
        self._intents = IntentCalls(store=place.store, prefix=place.prefix, owner=owner, on_intent=manager.apply)
        # An audit reads everything of a run: one at a time.
        self._auditing = asyncio.Semaphore(1)
        self._usage = usage
        self._validating = asyncio.Semaphore(MAX_VALIDATIONS)

    async def CreateRun(
        self, request: run_service_pb2.CreateRunRequest, context: grpc.aio.ServicerContext
    ) -> run_service_pb2.CreateRunResponse:
        """Validate the config and queue a run; with `validate_only` only validate, and create nothing.

        A repeated `request_id` returns the run that it created; AlreadyExistsError if that has another config.
        """
        config, record = await self._validated(request, calling_tenant())
        # Before workers are looked at: a repeated request gets its first answer, whatever is registered by now.
        if request.request_id and not request.validate_only:
            earlier = await find_request(self._store, self._prefix, record.request_id)
            if earlier is not None:
                return run_service_pb2.CreateRunResponse(run=await self._earlier(earlier, record))
        require_env_images(config, self._registry)
        if request.check_environments:
            await check_environments(config, self._registry)
        if request.validate_only:
            return run_service_pb2.CreateRunResponse(run=RunView(record).run)
        return run_service_pb2.CreateRunResponse(run=await self._create(record))

    async def ForkRun(
        self, request: run_service_pb2.ForkRunRequest, context: grpc.aio.ServicerContext
    ) -> run_service_pb2.ForkRunResponse:
        """Create a run that continues another one at a step: copy what it begins with, and queue it.

        It belongs to the parent's tenant, also if an operator asks for it: all runs of a lineage have one tenant.
        A repeated `request_id` returns the run that it created; AlreadyExistsError if that is of another config or
        step. Raises InvalidStateError for a fork of an evaluation, and InvalidSpecError or InvalidStateError if the
        fork's config cannot continue the parent.
        """
        parent = (await self._seen.find(request.name)).record
        if parent.kind == EVAL:
            raise InvalidStateError(
                f"run {parent.name!r} is an evaluation: it has no policy to continue from",
                reason="FORK_OF_EVALUATION",
                remedy="submit the evaluation again with the settings that you want",
            )
        wanted = new_run.as_create(request, parent, uid=new_uid())
        config, record = await self._validated(wanted, parent.tenant)
        # What `is_same_fork` compares with an earlier request; the whole plan comes below.
        record = replace(record, parent={"uid": parent.uid, "step": request.step})
        if request.request_id:
            earlier = await find_request(self._store, self._prefix, record.request_id)
            if earlier is not None:
                return run_service_pb2.ForkRunResponse(run=await self._earlier(earlier, record))
        require_env_images(config, self._registry)
        names = Names(self._prefix, parent.uid)
        plan = await asyncio.to_thread(plan_fork, self._store, names, name=parent.name, step=request.step)
        new_run.check_config(record.training, parent, plan)
        record = replace(record, parent=plan.to_json())
        return run_service_pb2.ForkRunResponse(run=await self._create(record))

    async def AuditRun(
        self, request: run_service_pb2.AuditRunRequest, context: grpc.aio.ServicerContext
    ) -> run_service_pb2.AuditRunResponse:
        """Check the promises of a run against its log and return the report; audits run one at a time."""
        uid = (await self._seen.find(request.name)).record.uid
        with waits.of_run(uid), waits.waiting(f"an audit of run {uid}: its turn", waits_on="object store") as wait:
            async with self._auditing:
                report = await self._readers.audit(
                    uid, on_progress=lambda text: wait.update(reason=f"an audit of run {uid}: {text}")
                )
        return run_service_pb2.AuditRunResponse(report=report)

    async def DeleteRun(
        self, request: run_service_pb2.DeleteRunRequest, context: grpc.aio.ServicerContext
    ) -> run_service_pb2.DeleteRunResponse:
        """Delete an ended run from the store and from Redis and return what it had; with `validate_only` only that.

        Raises InvalidStateError if the run is open, held or needed by forks, or becomes so meanwhile, and
        UnavailableError if objects cannot be removed now: the next call goes on.
        """
        uid = await self._uid_to_delete(request.name)
        deletion = await asyncio.to_thread(plan_deletion, self._store, Names(self._prefix, uid))
        if not request.validate_only:
            require_unneeded(deletion, may_be_open=False, may_be_needed=request.even_needed)
            if self._manager.holds(uid):
                raise InvalidStateError(
                    f"run {deletion.name!r} has just ended, and its exports are still being written",
                    reason="RUN_HELD",
                    remedy="ask again in a minute",
                )
            await begin_deletion(self._redis, self._store, deletion, by=self._owner)
            self._catalog.forget(uid)
            with waits.of_run(uid), waits.waiting(f"the deletion of run {uid}", waits_on="object store"):
                left = await asyncio.to_thread(delete_run, self._store, deletion, by=self._owner)
            if left:
                raise UnavailableError(
                    f"{len(left)} objects of run {deletion.name!r} cannot be removed now: {left[0]}",
                    reason="OBJECTS_LEFT",
                    remedy="ask again: the deletion goes on",
                )
        found = run_service_pb2.DeleteRunResponse(uid=uid, needed_by=deletion.needed_by)
        for kind, count in sorted(deletion.counts.items()):
            found.objects.add(kind=kind, count=count, size_bytes=deletion.sizes[kind])
        return found

    async def _uid_to_delete(self, name: str) -> str:
        """Return the uid of a run, or of one of that name whose deletion was begun; NotFoundError if there is none."""
        seen, wanted = self._seen, name.removeprefix("runs/")
        try:
            return (await seen.find(name)).record.uid
        except NotFoundError:
            uid = await asyncio.to_thread(find_tombstone, self._store, self._prefix, wanted, tenant=seen.tenant)
            if uid is None:
                raise
            return uid

    async def GetRun(
        self, request: run_service_pb2.GetRunRequest, context: grpc.aio.ServicerContext
    ) -> run_service_pb2.GetRunResponse:
        """Return one run as it is now.

        Its error is also set while something refuses to let it get ahead.
        """
        seen = self._seen
        view = await seen.find(request.name)
        # A copy: the error below belongs to this answer, and not to the view.
        run = self._shown(view)
        if not view.is_terminal and (problem := self._manager.held_up.problem(view.record.uid)) is not None:
            cause, by = problem.metadata["cause"], problem.metadata["component"]
            message = seen.without_others(problem.message, uid=view.record.uid)
            error = run_pb2.RunError(reason=cause, message=message, component=by, remedy=problem.remedy or "")
            run.error.CopyFrom(error)
        if (progress := self._manager.progress(view.record.uid)) is not None:
            run.progress.CopyFrom(progress)
        return run_service_pb2.GetRunResponse(run=run)

    async def ListRuns(
        self, request: run_service_pb2.ListRunsRequest, context: grpc.aio.ServicerContext
    ) -> run_service_pb2.ListRunsResponse:
        """Return a page of the runs that the caller sees, newest first; of a tenant, or in states, if asked for."""
        size, start = page(request.page_size, request.page_token)
        if (seen := self._seen.of(request.tenant)) is None:
            return run_service_pb2.ListRunsResponse()
        if request.states:
            # One more than the page: so a token is only given where something follows.
            runs = await self._in_states(seen, request.states, at_least=start + size + 1)
            shown = of_bounded_size(runs[start : start + size])
            return run_service_pb2.ListRunsResponse(
                runs=shown, next_page_token=next_token(start + len(shown), len(runs))
            )
        listed = await seen.list_names()
        views = await seen.read_listed(listed[start : start + size])
        shown = of_bounded_size([self._shown(view) for view in views])
        return run_service_pb2.ListRunsResponse(runs=shown, next_page_token=next_token(start + len(shown), len(listed)))

    async def _in_states(
        self, seen: SeenRuns, states: Collection[run_pb2.RunState], *, at_least: int
    ) -> list[run_pb2.Run]:
        """Return the newest runs in these states that are seen: at least `at_least`, or all if there are fewer.

        Runs that have ended are read only if one of the states is that of an ended or a damaged run.
        """
        if not TERMINAL.union([run_pb2.RUN_STATE_DAMAGED]).intersection(states):
            return [self._shown(each) for each in reversed(await seen.refresh()) if each.run.state in states]
        listed, runs = await seen.list_names(), []
        # A page at a time, the newest first: a deployment may have thousands of ended runs.
        for first in range(0, len(listed), PAGE_DEFAULT):
            views = await seen.read_listed(listed[first : first + PAGE_DEFAULT])
            runs += [self._shown(view) for view in views if view.run.state in states]
            if len(runs) >= at_least:
                break
        return runs

    def _shown(self, view: RunView) -> run_pb2.Run:
        """Return a copy of a run's public message, with its place in the queue while it is QUEUED."""
        run = run_pb2.Run()
        run.CopyFrom(view.run)
        run.queue_place = self._manager.queue_place(view, tenant=calling_tenant())
        return run

    async def CancelRun(
        self, request: run_service_pb2.CancelRunRequest, context: grpc.aio.ServicerContext
    ) -> run_service_pb2.CancelRunResponse:
        """Write the intent to end the run, then pass it to the driver.

        Cancelling a run that ended is an error; twice is not.
        """
        view = await self._seen.find(request.name)
        check_intent(request.reason, request.request_id)
        await self._intents.cancel(view, reason=request.reason, request_id=request.request_id)
        return run_service_pb2.CancelRunResponse(run=view.run)

    async def PauseRun(
        self, request: run_service_pb2.PauseRunRequest, context: grpc.aio.ServicerContext
    ) -> run_service_pb2.PauseRunResponse:
        """Write the intent to pause the run, then pass it to the driver.

        Pausing a run that ends or ended is an error; pausing twice is not.
        """
        view = await self._seen.find(request.name)
        check_intent(request.reason, request.request_id)
        await self._intents.pause(view, reason=request.reason, request_id=request.request_id)
        return run_service_pb2.PauseRunResponse(run=view.run)

    async def ResumeRun(
        self, request: run_service_pb2.ResumeRunRequest, context: grpc.aio.ServicerContext
    ) -> run_service_pb2.ResumeRunResponse:
        """Write the intent that the run goes on, then look for a free trainer.

        Reopens a failed run; an open one stays as it is. What it is to keep from here on is part of the intent.
        """
        view = await self._seen.find(request.name)
        check_intent("", request.request_id)
        retention = {
            name: min(getattr(request, f"retain_{name}"), _MOST_KEPT) or None
            for name in ("batches", "policies")
            if request.HasField(f"retain_{name}")
        }
        await self._intents.resume(view, request_id=request.request_id, retention=retention)
        return run_service_pb2.ResumeRunResponse(run=view.run)

    async def WatchRun(self, request: run_service_pb2.WatchRunRequest, context: grpc.aio.ServicerContext):
        """Yield the events after the cursor `request.after`, then new ones until the run has ended.

        Empty messages show that the stream is open. FAILED is no end of a run that was reopened. Raises
        UnavailableError when this process drains, RefusedError while something refuses to let the run get ahead,
        CorruptObjectError if the run cannot be read.
        """
        seen = self._seen
        view = await seen.find(request.name)
        if request.after and not _CURSOR.fullmatch(request.after):
            problem = Violation(field="after", value=request.after[:80], message="is not the cursor of an event")
            raise InvalidSpecError([problem], reason="CURSOR_INVALID", remedy="leave it out, or pass one that was sent")
        if view.damage is not None and self._catalog.is_unreadable(view):
            raise CorruptObjectError(view.run.error.message, reason=view.damage.reason)
        uid = view.record.uid
        feed = EventFeed(self._catalog, uid, after=request.after)
        last_sent, has_ended = time.monotonic(), False
        while not has_ended:
            if self._draining.is_set():
                raise UnavailableError(
                    "this orchestrator is draining",
                    reason="DRAINING",
                    remedy=f"watch again with after={feed.cursor!r}",
                    metadata={"cursor": feed.cursor},
                )
            view = self._catalog.known(uid) or view  # a rebuilt log makes a new one
            has_ended = view.is_terminal  # then no further event comes
            # Once more after the end was seen: events may have come in between.
            events = await feed.read(block_s=0.0 if has_ended else READ_BLOCK_S)
            if not events and not has_ended and (problem := self._manager.held_up.problem(uid)) is not None:
                raise seen.without_others_in(problem, uid=uid)
            for event in events:
                is_end = event.HasField("state_changed") and is_terminal(event.state_changed.new_state)
                if is_end and not await self._catalog.is_end(uid, event.state_changed.new_state):
                    # No header confirms this end, and a watcher would stop at it.
                    continue
                last_sent, has_ended = time.monotonic(), is_end
                yield run_service_pb2.WatchRunResponse(event=event)
            if has_ended:
                view = await self._catalog.find(uid)
                has_ended = view.is_terminal
            if time.monotonic() - last_sent > HEARTBEAT_S:
                last_sent = time.monotonic()
                yield run_service_pb2.WatchRunResponse()

    async def ListCheckpoints(
        self, request: run_service_pb2.ListCheckpointsRequest, context: grpc.aio.ServicerContext
    ) -> run_service_pb2.ListCheckpointsResponse:
        """Return a page of a run's checkpoints whose manifest is in the store, oldest first."""
        size, start = page(request.page_size, request.page_token)
        record = (await self._seen.find(request.parent)).record
        found = await asyncio.to_thread(self._checkpoints, record)
        return run_service_pb2.ListCheckpointsResponse(
            checkpoints=found[start : start + size], next_page_token=next_token(start + size, len(found))
        )

    async def ListMetrics(
        self, request: run_service_pb2.ListMetricsRequest, context: grpc.aio.ServicerContext
    ) -> run_service_pb2.ListMetricsResponse:
        """Return a page of a run's metrics by step, oldest first."""
        return await self._readers.metrics(request, (await self._seen.find(request.parent)).record)

    async def ListRollouts(
        self, request: run_service_pb2.ListRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> run_service_pb2.ListRolloutsResponse:
        """Return a page of the rollouts that the committed batches of a run resolved."""
        return await self._readers.rollouts(request, (await self._seen.find(request.parent)).record)

    async def GetLineage(
        self, request: run_service_pb2.GetLineageRequest, context: grpc.aio.ServicerContext
    ) -> run_service_pb2.GetLineageResponse:
        """Return where a rollout or a policy version comes from, and what came of it."""
        return await self._readers.lineage(request, (await self._seen.find(request.name)).record)

    async def ListUsage(
        self, request: run_service_pb2.ListUsageRequest, context: grpc.aio.ServicerContext
    ) -> run_service_pb2.ListUsageResponse:
        """Return what the runs that the caller sees have used, by tenant; of one tenant if asked for."""
        seen = self._seen.of(request.tenant)
        return run_service_pb2.ListUsageResponse(tenants=[] if seen is None else await self._usage.read(seen))

    async def ExplainRun(
        self, request: run_service_pb2.ExplainRunRequest, context: grpc.aio.ServicerContext
    ) -> run_service_pb2.ExplainRunResponse:
        """Return what every service of a run waits for.

        If the log cannot be read within `EXPLAIN_READ_S`, the run's state is that of the last look; UnavailableError if
        there was none.
        """
        # Redis or the store may be the very cause; then the view of the last look has to do.
        seen = self._seen
        known, note = seen.known(request.name), ""
        try:
            async with asyncio.timeout(EXPLAIN_READ_S):
                view = await seen.find(known.record.uid if known is not None else request.name)
        except (TimeoutError, UnavailableError, LogGoneError) as error:
            if known is None:
                why = seen.without_others(unanswered(self._owner) or str(error))
                raise UnavailableError(
                    f"run {request.name!r} cannot be looked up: {why}",
                    reason="LOG_UNREADABLE",
                    remedy="see whether Redis and the object store answer",
                ) from error
            view, note = known, "the run's log cannot be read now, its state is that of the last look"
        return seen.shown(self._manager.explain(view, note=note, tenant=seen.tenant), uid=view.record.uid)

    @property
    def _seen(self) -> SeenRuns:
        """Return the runs that the caller of this task sees: every method finds runs among these alone."""
        return SeenRuns(self._catalog, calling_tenant())

    async def _validated(
        self, request: run_service_pb2.CreateRunRequest, tenant: str
    ) -> tuple[RLConfig | EvalRunConfig, RunRecord]:
        """Check a request to create a run in a thread, and return the config and the record of the new run of `tenant`.

        Imports the user's functions. Raises InvalidSpecError with every violation.
        """

        def check() -> tuple[RLConfig | EvalRunConfig, RunRecord]:
            """Return the config and the record, checked and with the user's functions imported (blocking)."""
            config = validate(request, tenant=tenant)
            if isinstance(config, RLConfig):
                # Only to see whether they can be made.
                make_algorithms(config.orchestrator, self._manager.custom_code)
                Sampler.load(config.orchestrator.buffer, self._manager.custom_code, seed=config.orchestrator.seed)
            return config, make_record(request, config, tenant=tenant)

        with waits.shared("configs of {n} new runs to be checked", waits_on="orchestrator", quiet_s=1.0):
            async with self._validating:
                # It imports the user's modules, which may block for ever.
                config, record = await in_own_thread(check)
        if isinstance(config, RLConfig):
            require_loadable_loss(config, self._registry)
            self._manager.queue.require_place(config)
        return config, record

    async def _create(self, record: RunRecord) -> run_pb2.Run:
        """Create the run of a record, with what a fork begins with, wake the manager, and return the run.

        If its request id created a run before, that run is returned.
        """
        uid = await create_run(
            self._redis,
            self._store,
            self._prefix,
            uid=record.uid,
            name=record.name,
            request_id=record.request_id,
            run_json=record.encode(),
            prepare=partial(copy_fork, self._store, self._prefix),
        )
        self._manager.wake()
        if uid != record.uid:
            return await self._earlier(uid, record)
        return (await self._catalog.find(record.uid)).run

    async def _earlier(self, uid: str, record: RunRecord) -> run_pb2.Run:
        """Return the run `uid`, which an earlier request with the same request id created.

        AlreadyExistsError if that run's config or its fork differs from the one in `record`, which is asked for now.
        """
        # Its tenant is that of `record`: the ids of a tenant's requests begin with the tenant.
        view = await SeenRuns(self._catalog, record.tenant).find(uid)
        if view.record.run_hash != record.run_hash or not new_run.is_same_fork(record, view.record):
            request_id = within(record.tenant, record.request_id)
            raise AlreadyExistsError(
                f"request_id {request_id!r} was used for run {view.record.name!r} with another config "
                f"(hash {view.record.run_hash[:12]}, now {record.run_hash[:12]})",
                reason="REQUEST_ID_REUSED",
                remedy="use a new request_id for a new run",
                metadata={"request_id": request_id, "run": view.record.name},
            )
        return view.run

    def _checkpoints(self, record: RunRecord) -> list[checkpoint_pb2.Checkpoint]:
        """Return the checkpoints of a run whose manifest is in the store and can be read, oldest first (blocking)."""
        names = Names(self._prefix, record.uid)
        found = []
        for prefix in self._store.list_prefixes(names.checkpoints):
            step = prefix.removeprefix(names.checkpoints).rstrip("/")
            if step.isdecimal() and (checkpoint := self._checkpoint(record, names, int(step))) is not None:
                found.append(checkpoint)
        return found

    def _checkpoint(self, record: RunRecord, names: Names, step: int) -> checkpoint_pb2.Checkpoint | None:
        """Return the committed checkpoint of a step; None if it has no manifest, or a damaged one, which is logged."""
        key = newest_revision(self._store, names.checkpoint_manifest(step))
        if (info := self._store.head(key)) is None:
            return None
        try:
            size_bytes = _manifest_bytes(self._store.get(key, max_bytes=MAX_JSON_BYTES), what=self._store.uri(key))
        except CorruptObjectError as error:
            logger.warning("a damaged checkpoint is not listed", extra={"run": record.name, "error": error.message})
            return None
        checkpoint = checkpoint_pb2.Checkpoint(
            name=f"runs/{record.name}/checkpoints/{step:08d}",
            step=step,
            uri=self._store.uri(key),
            size_bytes=size_bytes,
        )
        checkpoint.create_time.FromNanoseconds(int(info.modified * 1e9))
        return checkpoint


def _manifest_bytes(data: bytes, *, what: str) -> int:
    """Return the total size in bytes of the objects that a checkpoint's manifest names.

    Raise CorruptObjectError, naming `what`, if the manifest cannot be read.
    """
    reason = "CHECKPOINT_MANIFEST_INVALID"
    raw = decode_object(data, what=what, reason=reason)
    try:
        require_checksum(raw)
        return sum(item.integer("size_bytes", most=1 << 50) for item in Fields(raw).objects("objects", most=1 << 16))
    except ValueError as error:
        raise CorruptObjectError(f"{what} cannot be read: {error}", reason=reason) from error
