"""Moves policy versions into the run's inference replicas, level-triggered: desired against reported, until equal.

A lost message delays, it never diverges: each replica has one task that repeats `UpdatePolicy` with the newest version
until the replica says that it serves it. Replicas join when they register and leave when their lease ends.

For an evaluation one replica is held: it is driven to the version that is evaluated, also back to it, and stays there
until the evaluation is over, while the others go on. A run's only replica serves its training meanwhile, too, as long
as its version is new enough for that.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from millrace.errors import MillraceError
from millrace.internal.v1 import policy_pb2, policy_service_pb2, policy_service_pb2_grpc
from millrace.orchestrator.events import RunEvents
from millrace.orchestrator.play.routing import ReadyReplica
from millrace.orchestrator.workers import WorkerKind, WorkerRecord, WorkerRegistry
from millrace.rollouts.routed_experts import RoutedForm
from millrace.rpc.channel import call, open_channel
from millrace.telemetry import waits
from millrace.v1 import event_pb2

logger = logging.getLogger(__name__)

UPDATE_WAIT_S = 10.0
"""How long one UpdatePolicy call waits inside the replica."""
UPDATE_TIMEOUT_S = UPDATE_WAIT_S + 10.0
RETRY_S = 1.0
PACE_S = 0.05
STATUS_TIMEOUT_S = 5.0
LOOK_S = 5.0
"""How often a replica that serves what it shall is asked whether it still does."""
SLOW_S = 600.0
"""Age from which a replica's update is overdue: it may be loading a large model."""
RESCAN_S = 1.0
"""How often the registry is looked at for replicas that joined or left, if nothing wakes us."""


class PolicyDriver:
    """Drives all replicas of one run to the newest published version."""

    def __init__(
        self,
        *,
        run_uid: str,
        epoch: int,
        registry: WorkerRegistry,
        events: RunEvents,
        on_change: Callable[[], None],
        is_due: Callable[[int], bool] = lambda version: False,
    ) -> None:
        """Make a driver of the replicas that a run has, under the orchestrator's `epoch`.

        `on_change` is called when what replicas serve may have changed. `is_due` says whether a version is to be
        evaluated, so that a replica may be held at it.
        """
        self._run_uid = run_uid
        self._is_due = is_due
        self._epoch = epoch
        self._registry = registry
        self._events = events
        self._on_change = on_change
        self._served: dict[str, policy_service_pb2.PolicyStatus] = {}
        self.routed: RoutedForm | None = None
        """What recorded experts look like in the newest status that has this; None before the first."""
        self._announced: dict[str, tuple[int, int]] = {}
        self._failures: dict[str, str] = {}
        self._suspected: set[str] = set()
        self._nudges: dict[str, asyncio.Event] = {}
        """By replica: set when it is suspected, or when there may be another version for it."""
        self._due: policy_pb2.PolicyEntry | None = None
        self._wanted: int | None = None
        self._held: policy_pb2.PolicyEntry | None = None
        self._holder = ""
        self.desired: policy_pb2.PolicyEntry | None = None
        self._ready: list[ReadyReplica] | None = None
        self._newest: int | None = None
        self._looked = 0

    def publish(self, entry: policy_pb2.PolicyEntry) -> None:
        """Make a newly published version the one that replicas shall serve; one that is not newer is ignored.

        One that is to be evaluated becomes `newest_due`, at which a replica may be held (`hold`).
        """
        current = self.desired
        if current is not None and (entry.lineage, entry.version) <= (current.lineage, current.version):
            return
        self.desired = entry
        if self._is_due(entry.version):
            self._due = entry
        self._hold_due()
        self._wake()

    def hold(self, version: int) -> None:
        """Have one replica stop at the newest published version that is due and at least `version`, once there is one.

        It stays there until `release`. If it is lost, another one takes its place.
        """
        self._wanted = version
        self._hold_due()
        self._wake()

    def release(self) -> None:
        """Let the replica that was held go on to the newest version, and wake the loop."""
        self._wanted = self._held = None
        self._holder = ""
        self._wake()
        self._change()

    @property
    def newest_due(self) -> int | None:
        """Return the newest published version that is to be evaluated; None before the first."""
        return None if self._due is None else self._due.version

    @property
    def held_version(self) -> int | None:
        """Return the version that a held replica serves; None while none does."""
        return next((replica.version for replica in self.ready() if replica.is_held), None)

    def _hold_due(self) -> None:
        """Hold the newest published version that is due for evaluation, once it is at least the wanted version.

        The replica that serves the nearest version becomes the holder; another takes its place if it is lost. Until
        `release` the version stays the same. Does nothing while none is wanted or held.
        """
        if self._held is None and self._wanted is not None and self._due and self._due.version >= self._wanted:
            self._held, self._ready = self._due, None
        if self._held is None:
            return
        owned = self._registry.owned(WorkerKind.INFERENCE, self._run_uid)
        able, version = {record.worker_id for record in owned if record.takes_work}, self._held.version
        if self._holder not in able:
            served = {name: status.version for name, status in self._served.items()}
            # The replica with the nearest version has the least to load; equal ones are decided by id.
            self._holder = min(able, key=lambda each: (abs(served.get(each, -1) - version), each), default="")
            self._wake()

    def _target(self, worker_id: str) -> policy_pb2.PolicyEntry | None:
        """Return the policy that a replica shall serve: the held one if it is the holder.

        None before the first publication.
        """
        return self._held if self._held is not None and worker_id == self._holder else self.desired

    def _wake(self) -> None:
        """Wake the task of every replica, because what they shall serve may have changed."""
        self._ready = None
        for nudge in self._nudges.values():
            nudge.set()

    def ready(self) -> list[ReadyReplica]:
        """Return the replicas that serve some version of this run's policy and take work, in order of id."""
        if self._ready is None or self._looked != self._registry.revision:
            self._ready, self._looked = self._find_ready(), self._registry.revision
            self._newest = max((replica.version for replica in self._ready), default=None)
        return self._ready

    def _change(self) -> None:
        """Note that what replicas serve may have changed, and call `on_change`."""
        self._ready = None
        self._on_change()

    def _find_ready(self) -> list[ReadyReplica]:
        """Return the replicas that serve some version of the run's policy and take work, from what they last
        reported.
        """
        replicas = []
        for record in self._registry.owned(WorkerKind.INFERENCE, self._run_uid):
            if not record.takes_work:
                continue
            status = self._served.get(record.worker_id)
            if status is not None and status.has_version and status.state != policy_service_pb2.POLICY_STATE_BROKEN:
                replicas.append(
                    ReadyReplica(
                        worker_id=record.worker_id,
                        http_url=record.worker.http_url,
                        model=status.model_name,
                        version=status.version,
                        max_num_seqs=status.max_num_seqs,
                        is_applying=status.state == policy_service_pb2.POLICY_STATE_APPLYING,
                        is_held=self._is_held(record.worker_id),
                    )
                )
        return replicas

    def up_to(self, version: int) -> str:
        """Return the kind of worker on which it depends that `version` is served.

        That is the trainer until the version is published, then inference.
        """
        is_published = self.desired is not None and self.desired.version >= version
        return "inference" if is_published else "trainer"

    def served_version(self) -> int | None:
        """Return the newest version that a ready replica serves; None if there is none."""
        self.ready()
        return self._newest

    def oldest_in_use(self) -> int | None:
        """Return the oldest version that a replica serves or shall serve; None if there is none."""
        wanted = (entry.version for entry in (self.desired, self._due, self._held) if entry is not None)
        served = (status.version for status in self._served.values() if status.has_version)
        return min((*wanted, *served), default=None)

    def known(self) -> set[str]:
        """Return the worker ids of the run's replicas that are registered, ready or not."""
        return {r.worker_id for r in self._registry.owned(WorkerKind.INFERENCE, self._run_uid)}

    def replica_at(self, http_url: str) -> str:
        """Return the worker id of the run's replica with that base URL; empty if it is not known."""
        owned = self._registry.owned(WorkerKind.INFERENCE, self._run_uid)
        return next((record.worker_id for record in owned if record.worker.http_url == http_url), "")

    def suspect(self, worker_id: str) -> None:
        """Treat a replica as not ready until it answers that it serves, because a rollout lost its engine there.

        It is asked at once. Does nothing for a replica that is not known to serve anything.
        """
        if self._served.pop(worker_id, None) is not None:
            logger.warning("replica lost a request, asking whether it serves", extra={"worker": worker_id})
            self._suspected.add(worker_id)
            self._nudges[worker_id].set()
            self._change()

    async def run(self) -> None:
        """Assign replicas to the run while it has a trainer, and keep each at its target by a task, until cancelled."""
        tasks: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            # unregistered wait: a periodic look; what it awaits is registered where it is awaited
            while True:
                # Only a run that has a trainer takes replicas, else two runs could each hold half of what they need.
                if self._registry.owned(WorkerKind.TRAINER, self._run_uid):
                    self._registry.claim(WorkerKind.INFERENCE, self._run_uid)
                owned = {
                    record.worker_id: record for record in self._registry.owned(WorkerKind.INFERENCE, self._run_uid)
                }
                for worker_id in tasks.keys() - owned.keys():
                    tasks.pop(worker_id).cancel()
                    self._suspected.discard(worker_id)
                    del self._nudges[worker_id]
                    self._served.pop(worker_id, None)
                    self._change()
                for worker_id in owned.keys() - tasks.keys():
                    self._nudges[worker_id] = asyncio.Event()
                    tasks[worker_id] = group.create_task(self._drive(owned[worker_id]))
                # The replica that holds a version may be gone.
                self._hold_due()
                await asyncio.sleep(RESCAN_S)

    async def _drive(self, record: WorkerRecord) -> None:
        """Bring a replica to its target version whenever it does not serve it; until cancelled."""
        async with open_channel(record.worker.address) as channel:
            stub = policy_service_pb2_grpc.PolicyServiceStub(channel)
            # After a takeover it may serve more than this driver has read of yet.
            await self._refresh(stub, record)
            while True:
                nudge = self._nudges[record.worker_id]
                desired = self._target(record.worker_id)
                if desired is None or self._serves(record.worker_id, desired):
                    # A replica may also lose its policy by itself. Its heartbeats say so; else it is asked.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_S):
                            await nudge.wait()
                    # Before the target is looked at again, so that no wake-up is lost in between.
                    nudge.clear()
                    is_suspected = record.worker_id in self._suspected
                    # The worker may have registered again, with another record.
                    known = self._registry.by_id.get(record.worker_id, record)
                    is_reported = not is_suspected and self._is_target(record.worker_id, known.policy, desired)
                    if desired is not None and desired is self._target(record.worker_id) and not is_reported:
                        await self._refresh(stub, record)
                    continue
                with waits.waiting(
                    f"replica {record.worker_id} to serve policy {desired.version}",
                    waits_on=record.worker_id,
                    deadline_s=SLOW_S,
                ):
                    # Until it serves the version, or there is another one for it, which the next round asks for.
                    while desired is self._target(record.worker_id) and not self._serves(record.worker_id, desired):
                        await self._update(stub, record, desired)

    async def _update(
        self,
        stub: policy_service_pb2_grpc.PolicyServiceStub,
        record: WorkerRecord,
        desired: policy_pb2.PolicyEntry,
    ) -> None:
        """Ask a replica once to serve `desired`; record what it answers, and pause if it does not serve it yet.

        An error is logged, or reported in an event when it is new; the caller tries again.
        """
        request = policy_service_pb2.UpdatePolicyRequest(
            run_uid=self._run_uid,
            policy=desired,
            inflight_mode=policy_service_pb2.INFLIGHT_MODE_KEEP,
            epoch=self._epoch,
            wait_seconds=UPDATE_WAIT_S,
        )
        try:
            response = await call(stub.UpdatePolicy, request, timeout_s=UPDATE_TIMEOUT_S)
        except MillraceError as error:
            self._served.pop(record.worker_id, None)
            self._change()
            logger.warning(
                "policy update failed, retrying",
                extra={"worker": record.worker_id, "version": desired.version, "error": str(error)},
            )
            await asyncio.sleep(RETRY_S)
            return
        status = response.status
        self._take(record, status)
        if self._serves(record.worker_id, desired):
            await self._announce(record.worker_id, status)
        elif status.error:
            # The run's trainer gets the number of such reports by its heartbeat.
            if status.is_damaged:
                self._registry.report_damage(self._run_uid, desired)
            failure = f"replica {record.worker_id} could not take policy {desired.version}: {status.error}"
            if self._failures.get(record.worker_id) != failure:
                self._failures[record.worker_id] = failure
                await self._events.warning("POLICY_UPDATE_FAILED", f"{failure}; trying again every {RETRY_S:g} s")
            await asyncio.sleep(RETRY_S)
        else:
            # The replica answered before it was done: do not ask in a busy loop.
            await asyncio.sleep(PACE_S)

    async def _announce(self, worker_id: str, status: policy_service_pb2.PolicyStatus) -> None:
        """Write the event that a replica serves the version of `status`, unless its last event was of the same
        version.
        """
        served = (status.lineage, status.version)
        if self._announced.get(worker_id) == served:
            return
        self._announced[worker_id] = served
        await self._events.policy_served(
            event_pb2.PolicyServed(
                replica=worker_id,
                lineage=status.lineage,
                version=status.version,
                pause_seconds=status.pause_seconds,
                proof=status.proof,
                fetched_bytes=status.fetched_bytes,
                full_bytes=status.full_bytes,
                update_seconds=status.update_seconds,
            )
        )

    async def _refresh(self, stub: policy_service_pb2_grpc.PolicyServiceStub, record: WorkerRecord) -> None:
        """Ask a replica what it serves and record the answer; if it does not answer it counts as serving nothing."""
        self._suspected.discard(record.worker_id)
        request = policy_service_pb2.GetPolicyStatusRequest()
        try:
            response = await call(stub.GetPolicyStatus, request, timeout_s=STATUS_TIMEOUT_S, waits_on=record.worker_id)
        except MillraceError as error:
            logger.warning("replica does not answer", extra={"worker": record.worker_id, "error": str(error)})
            self._served.pop(record.worker_id, None)
            self._change()
        else:
            self._take(record, response.status)

    def _take(self, record: WorkerRecord, status: policy_service_pb2.PolicyStatus) -> None:
        """Record which version a replica says it serves, and call `on_change`.

        A replica that says it serves another run counts as serving nothing.
        """
        # A replica may still serve another run: to this one it serves nothing then.
        if status.run_uid == self._run_uid:
            self._served[record.worker_id] = status
            if status.HasField("routed"):
                form = status.routed
                self.routed = RoutedForm(num_layers=form.num_layers, num_experts=form.num_experts, top_k=form.top_k)
        else:
            self._served.pop(record.worker_id, None)
        self._change()

    def _serves(self, worker_id: str, desired: policy_pb2.PolicyEntry) -> bool:
        """Return whether a replica serves its target: exactly that version if it is held, else that one or a newer."""
        return self._is_target(worker_id, self._served.get(worker_id), desired)

    def _is_target(
        self,
        worker_id: str,
        status: policy_service_pb2.PolicyStatus | None,
        desired: policy_pb2.PolicyEntry | None,
    ) -> bool:
        """Return whether a replica with this status serves the desired version; False if either is None.

        A replica that is held serves exactly that one, all others that one or a newer one.
        """
        if status is None or desired is None or status.run_uid != self._run_uid:
            return False
        if not status.has_version or status.state != policy_service_pb2.POLICY_STATE_SERVING:
            return False
        # The lineage first: a version of a newer lineage replaces all versions of older ones, whatever their numbers.
        served, wanted = (status.lineage, status.version), (desired.lineage, desired.version)
        is_exact = desired is self._held and worker_id == self._holder
        return served == wanted if is_exact else served >= wanted

    def _is_held(self, worker_id: str) -> bool:
        """Return whether a replica serves the version that it is held at."""
        return self._held is not None and worker_id == self._holder and self._serves(worker_id, self._held)
