"""What the dashboard sees of this orchestrator: its runs from memory, and its public API for everything else."""

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, cast

from millrace.config import EvalRunConfig, RLConfig
from millrace.config.tree import differences
from millrace.errors import MillraceError, NotFoundError, UnavailableError
from millrace.orchestrator.catalog import ConfigText, RunCatalog, RunView
from millrace.orchestrator.chain import boxes
from millrace.orchestrator.manager import RunManager
from millrace.orchestrator.service import RunServicer
from millrace.orchestrator.tenants import SeenRuns
from millrace.orchestrator.why import chain_of, unanswered
from millrace.orchestrator.workers import QUIET_S, WorkerKind, WorkerRecord, WorkerRegistry
from millrace.rpc.access import set_caller
from millrace.runlog.records.run_record import EVAL
from millrace.runlog.run_status import state_name
from millrace.telemetry.logging import masked, secrets_of
from millrace.v1 import audit_pb2, run_pb2, run_service_pb2

if TYPE_CHECKING:
    import grpc.aio

logger = logging.getLogger(__name__)

CALL_S = 10.0
"""Deadline of what has to ask Redis or the store."""
AUDIT_S = 300.0
"""Deadline of an audit, which reads the whole log."""
MAX_ENDED = 1000
"""How many of the newest runs a list of the dashboard has, also if they have ended."""
READ_AGAIN_S = 5.0
_ASK_AGAIN = "see whether both answer, and ask again: what was done is not done twice"
# The methods that are called here do not look at it.
_NO_CALL = cast("grpc.aio.ServicerContext", None)


class OrchestratorSources:
    """`RunSources` over one orchestrator, and what all callers share."""

    def __init__(
        self, *, service: RunServicer, catalog: RunCatalog, manager: RunManager, registry: WorkerRegistry, owner: str
    ) -> None:
        """Make the dashboard's sources over the parts of this orchestrator, which `owner` names."""
        self.service = service
        self.catalog = catalog
        self.manager = manager
        self.registry = registry
        self.owner = owner
        self.listings: dict[str, asyncio.Task[run_service_pb2.ListCheckpointsResponse]] = {}
        self.config_texts: dict[str, ConfigText] = {}
        self.secrets = secrets_of(os.environ)
        self.reading: asyncio.Task[None] | None = None
        self.read_at = 0.0

    def seen_by(self, tenant: str) -> "OrchestratorSource":
        """Return the runs of a tenant, or with an empty `tenant` all, for one request.

        The task that calls this answers that request: what it asks of the public API is the tenant's.
        """
        set_caller(tenant)
        return OrchestratorSource(self, SeenRuns(self.catalog, tenant))


class OrchestratorSource:
    """A `RunSource` over one orchestrator, for one request."""

    def __init__(self, shared: OrchestratorSources, seen: SeenRuns) -> None:
        """Make the source of the runs in `seen`; prefer `OrchestratorSources.seen_by`."""
        self._shared = shared
        self._seen = seen
        self._service, self._catalog, self._manager = shared.service, shared.catalog, shared.manager
        self._registry, self._owner = shared.registry, shared.owner

    def list_runs(self, *, config: str = "") -> list[dict[str, Any]]:
        """Return a summary of every run that is seen, the newest first; with `config` of those whose configs match it.

        Open runs are as the manager last saw them, which looks twice a second. Of those that have ended, the newest
        `MAX_ENDED` are read in the background once a list was asked for; others are shown once they were opened.
        """
        shared = self._shared
        if shared.reading is None or (shared.reading.done() and time.monotonic() - shared.read_at > READ_AGAIN_S):
            shared.read_at = time.monotonic()
            shared.reading = asyncio.create_task(self._read_ended(), name="ended runs of the dashboard")
        views = sorted(self._seen.views, key=lambda view: view.record.uid, reverse=True)
        return [self._summary(view) for view in views if not config or self._config_text(view).matches(config)]

    async def find_run(self, name: str) -> dict[str, Any]:
        """Return a run's summary, its config with secrets masked, its hash, and the figures of its status.

        Raise NotFoundError if the run is unknown.
        """
        view = self._seen.known(name)
        if view is None:
            async with _deadline():
                view = await self._seen.find(name)
        model = EvalRunConfig if view.record.kind == EVAL else RLConfig
        # Masked under the names of its own keys: in the answer below these are values of `key`.
        config = masked(view.record.config or {}, self._shared.secrets)
        keys = [
            {"key": each.key, "value": each.value, "default": each.default, "differs": each.differs}
            for each in differences(config, model)
        ]
        status = view.status
        return self._summary(view) | {
            # Of all workers, because the log of an ended run names workers that the run does not hold any more.
            "names": self._registry.names(),
            "config": keys,
            "run_hash": view.record.run_hash,
            "code_version": view.record.code_version,
            "dropped": dict(status.dropped),
            "served": dict(status.served),
            "entered": {state_name(state): at for state, at in status.entered.items()},
        }

    async def _read_ended(self) -> None:
        """Read the newest runs into memory, also those that have ended. An outage is logged, and tried again later."""
        try:
            await self._catalog.read_listed((await self._catalog.list_names())[:MAX_ENDED])
        except MillraceError as error:
            logger.warning("cannot list runs for the dashboard", extra={"error": str(error)})

    def uid_of(self, name: str) -> str:
        """Return the uid of a run that is known."""
        return self._known(name).record.uid

    async def checkpoints(self, name: str) -> list[dict[str, Any]]:
        """Return the committed checkpoints of a known run, oldest first; raise UnavailableError after `CALL_S`."""
        listing = self._listed_checkpoints(self._known(name).record.uid)
        async with _deadline():
            # Shielded: other pages may wait for the same listing.
            found = await asyncio.shield(listing)
        return [
            {
                "step": each.step,
                "uri": each.uri,
                "size_bytes": each.size_bytes,
                "time": each.create_time.ToNanoseconds() / 1e9,
            }
            for each in found.checkpoints
        ]

    def _listed_checkpoints(self, uid: str) -> asyncio.Task[run_service_pb2.ListCheckpointsResponse]:
        """Return the task that lists a run's checkpoints: the one that is running, or a new one.

        It reads every manifest, in a thread that no deadline ends: pages that ask again must not start another one.
        """
        found = self._shared.listings.get(uid)
        if found is None or found.done():
            request = run_service_pb2.ListCheckpointsRequest(parent=uid, page_size=1000)
            found = asyncio.create_task(self._service.ListCheckpoints(request, _NO_CALL), name=f"checkpoints of {uid}")
            # Looks at the error of a task that nobody awaits any more: asyncio would log it as never retrieved.
            found.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._shared.listings[uid] = found
        return found

    def explain(self, name: str) -> dict[str, Any]:
        """Return from memory why the run does not move: a summary, the chain of waits as boxes, and at most 200 waits.

        A run that has ended has no chain.
        """
        view = self._known(name)
        uid, tenant, ended = view.record.uid, self._seen.tenant, view.is_terminal
        found = self._seen.shown(self._manager.explain(view, tenant=tenant), uid=uid)
        chain = [] if ended else boxes(chain_of(uid, self._registry, owner=self._owner, tenant=tenant))
        for box in chain:
            box["does"] = self._seen.without_others(box["does"], uid=uid)
        return {
            "summary": found.summary,
            "chain": chain,
            "waits": [
                {
                    "owner": wait.owner,
                    "reason": wait.reason,
                    "waits_on": wait.waits_on,
                    "age_seconds": wait.age_seconds,
                    "deadline_seconds": wait.deadline_seconds,
                }
                for wait in found.waits[:200]
            ],
        }

    async def act(self, name: str, action: str, *, reason: str) -> None:
        """Pause, resume or cancel a known run through the public API, as `action` ("pause", "resume", "cancel") says.

        `reason` is the user's. Raises NotFoundError for another action or an unknown run.
        """
        uid = self._known(name).record.uid
        async with _deadline():
            match action:
                case "pause":
                    request = run_service_pb2.PauseRunRequest(name=uid, reason=reason)
                    await self._service.PauseRun(request, _NO_CALL)
                case "resume":
                    await self._service.ResumeRun(run_service_pb2.ResumeRunRequest(name=uid), _NO_CALL)
                case "cancel":
                    request = run_service_pb2.CancelRunRequest(name=uid, reason=reason)
                    await self._service.CancelRun(request, _NO_CALL)
                case _:
                    raise NotFoundError(f"nothing of a run is called {action!r}", reason="PAGE_NOT_FOUND")

    async def audit(self, name: str) -> audit_pb2.AuditReport:
        """Audit the run's whole log and return the report; raise UnavailableError after `AUDIT_S`."""
        request = run_service_pb2.AuditRunRequest(name=self._known(name).record.uid)
        async with _deadline(AUDIT_S, remedy=f"an audit of a long run takes longer: `millrace run audit {name}`"):
            found = await self._service.AuditRun(request, _NO_CALL)
        return found.report

    def trouble(self) -> str:
        """Return in words what of Redis and the store does not answer at the moment; empty if both answer."""
        return self._seen.without_others(unanswered(self._owner))

    def _known(self, name: str) -> RunView:
        """Return the view in memory of a run, by its name, its uid, the beginning of its name, or `-` for the newest.

        Raise NotFoundError if no run, or more than one, is meant.
        """
        view = self._seen.known(name)
        if view is None:
            raise NotFoundError(
                f"no run {name[:100]!r} is known", reason="RUN_NOT_FOUND", remedy="see the list of runs"
            )
        return view

    def _config_text(self, view: RunView) -> ConfigText:
        """Return the text of a run's config to search in, made once: a config never changes."""
        found = self._shared.config_texts.get(view.record.uid)
        if found is None:
            found = ConfigText.of(view.record.config or {}, secrets=self._shared.secrets)
            self._shared.config_texts[view.record.uid] = found
        return found

    def _summary(self, view: RunView) -> dict[str, Any]:
        """Return what a list of the dashboard shows of a run: names, state, times, progress and the workers that
        serve it.
        """
        run = view.run
        progress = self._manager.progress(view.record.uid) or run.progress
        records = self._registry.records()
        names = self._registry.names()
        # Env-servers are given to no run: they serve every run that has not ended.
        mine = [each for each in records if each.run_uid == view.record.uid]
        serving = [] if view.is_terminal else [each for each in records if each.kind is WorkerKind.ENV_SERVER]
        return {
            "name": view.record.name,
            "tenant": view.record.tenant,
            "uid": view.record.uid,
            "kind": view.record.kind,
            "state": run_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_"),
            "error": _error(run.error) if run.HasField("error") else None,
            "created": _time(run, "create_time"),
            "started": _time(run, "start_time"),
            "ended": _time(run, "end_time"),
            "labels": dict(run.labels),
            "parent": {"name": run.parent.name, "step": run.parent.step} if run.HasField("parent") else None,
            "step": progress.step,
            "max_steps": progress.max_steps,
            "version": progress.policy_version,
            "inference_version": progress.min_inference_version,
            "reward": progress.reward if math.isfinite(progress.reward) else None,
            "rollouts": progress.num_rollouts,
            "tokens": progress.num_tokens,
            "groups": progress.num_groups,
            "groups_dropped": progress.num_groups_dropped,
            "environments": [
                {
                    "env": each.env,
                    "rollouts": each.num_rollouts,
                    "failed": each.num_failed,
                    "first_error": each.first_error,
                }
                for each in progress.environments
            ],
            "held_by": sorted(each.worker_id for each in mine),
            "queue_place": self._manager.queue_place(view, tenant=self._seen.tenant),
            "workers": [
                *(_worker(each, names[each.worker_id]) for each in mine),
                # What an env-server plays is of all runs.
                *(_worker(each, names[each.worker_id], shows_work=not self._seen.tenant) for each in serving),
            ],
            "has_ended": view.is_terminal,
        }


def _error(error: run_pb2.RunError) -> dict[str, str]:
    """Return reason, message and remedy of a run's error, by name."""
    return {"reason": error.reason, "message": error.message, "remedy": error.remedy}


def _worker(record: WorkerRecord, name: str, *, shows_work: bool = True) -> dict[str, Any]:
    """Return what the dashboard shows of a worker: its host, state, activity and GPUs; `name` is its short name.

    Without `shows_work` the activity is left out.
    """
    is_silent = time.monotonic() - record.silent_since > QUIET_S
    return {
        "id": record.worker_id,
        "name": name,
        "host": host_of(record.worker_id, record.kind),
        "state": "leaving" if record.is_leaving else "silent" if is_silent else "ready",
        "does": _does(record) if shows_work else "",
        "gpus": [
            {
                "index": gpu.index, "id": gpu.uuid, "name": gpu.name, "memory_used": gpu.memory_used,
                "memory_total": gpu.memory_total, "utilization": gpu.utilization, "power_watts": gpu.power_watts,
            }
            for gpu in record.gpus
        ],
    }  # fmt: skip


def _does(record: WorkerRecord) -> str:
    """Return in words what a worker does at the moment."""
    match record.kind:
        case WorkerKind.TRAINER:
            return f"trains step {record.trainer.step + 1}" if record.trainer is not None and record.run_uid else "free"
        case WorkerKind.INFERENCE:
            is_serving = record.policy is not None and record.policy.has_version
            return (
                f"serves v{record.policy.version}" if record.policy is not None and is_serving else "serves nothing yet"
            )
        case _:
            return f"plays {record.num_playing} rollouts"


def _time(run: run_pb2.Run, name: str) -> float | None:
    """Return a timestamp of the run, the field `name`, in seconds since the epoch; None if it is not set."""
    return getattr(run, name).ToNanoseconds() / 1e9 if run.HasField(name) else None


@contextlib.asynccontextmanager
async def _deadline(seconds: float = CALL_S, *, remedy: str = _ASK_AGAIN) -> AsyncIterator[None]:
    """Run the block for `seconds` at most; raise UnavailableError with `remedy` when the time is over."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise UnavailableError(
            f"Redis or the object store did not answer within {seconds:.0f} s",
            reason="LOG_UNREADABLE",
            remedy=remedy,
        ) from error


def host_of(worker_id: str, kind: str) -> str:
    """Return the host in a worker's id, `{kind}-{host}-{process id}-{random part}`; "" for an id of another form."""
    parts = worker_id.removeprefix(f"{kind}-").rsplit("-", 2)
    return parts[0] if len(parts) == 3 else ""
