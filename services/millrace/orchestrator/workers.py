"""Who works for this deployment: the registry of env-servers, inference replicas and trainers.

The registry is soft state: every worker repeats what it is and does with each heartbeat, so an orchestrator that starts
with an empty registry knows all of them within one heartbeat interval.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from millrace.errors import CapacityError
from millrace.internal.v1 import policy_pb2, policy_service_pb2, worker_service_pb2
from millrace.orchestrator.queue.limits import GivenWorker, Limits, Terms
from millrace.orchestrator.worker_names import KINDS, Numbered, WorkerKind, WorkerNames
from millrace.rpc.worker import from_proto, gpus_from_proto
from millrace.telemetry.gpus import GpuUse
from millrace.telemetry.waits import Wait

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""Heartbeat interval that workers get, unless there are so many that this would be more than `HEARTBEATS_PER_S`."""
HEARTBEATS_PER_S = 500
"""Heartbeats of env-servers and replicas that this process takes in a second, about a third of a core."""
INTERVAL_SPREAD = (0.75, 1.25)
"""Bounds of the random factor on an interval that is longer than `HEARTBEAT_S`."""
LEASE_S = 10.0
"""Silence, from when a heartbeat is due, after which a worker counts as lost: ten of them, so that a busy laptop loses
none."""
LOST_ROUNDS = 3
"""Rounds of heartbeats in which others must have been heard meanwhile: those that wait for this process are taken in
turn. A round takes until half of the workers were heard, one of them twice, or `LEASE_S`."""
PULSE_S, STOOD_STILL_S = 0.5, 2.0
"""How often this process looks whether it runs, and the gap from which on it says that it did not."""
LOOK_S = 0.5
"""Shortest time between two looks for leases that ran out."""
MAX_LOST = 64
"""Lost workers that are remembered, to name them."""
QUIET_S = 5.0
"""Silence after which a worker gets nothing new until it is heard again."""
LEAVING_LEASE_S = 3.0
"""Silence after which a worker that announced its end counts as gone."""
RETIRED_S = 600.0
"""How long heartbeats' answers name a run that was paused or has ended."""
MAX_RETIRED = 64
"""How many such runs an answer names: the newest."""
HOME_S = 60.0
"""How long a replica that registers is kept for the run that it serves: until a successor has claimed that."""
MAX_WORKERS = 4096
"""Most workers that are registered at once."""
MAX_WAITS = 512
"""Most waits that are kept of one worker's report."""


@dataclass(slots=True)
class WorkerRecord:
    """One registered worker and its last report."""

    worker: worker_service_pb2.Worker
    last_seen: float
    registered: float = field(default_factory=time.monotonic)
    """When it joined, monotonic."""
    trainer: worker_service_pb2.TrainerStatus | None = None
    policy: policy_service_pb2.PolicyStatus | None = None
    num_playing: int = 0
    is_leaving: bool = False
    """It drains: it gets nothing new."""
    run_uid: str = ""
    """Run that this trainer or replica is given to; empty when free. Env-servers serve every run."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the worker has something to hear that it should not wait for."""
    interval_s: float = 0.0
    """Seconds after `last_seen` in which it was asked to send its next heartbeat; 0: `HEARTBEAT_S`."""
    round: int = 0
    """The registry's round of heartbeats in which it was heard last."""
    worker_id: str = field(init=False)
    """Unique id of the process."""
    kind: WorkerKind = field(init=False)
    _request: worker_service_pb2.HeartbeatRequest = field(default_factory=worker_service_pb2.HeartbeatRequest)

    def __post_init__(self) -> None:
        self.worker_id, self.kind = self.worker.worker_id, KINDS[self.worker.kind]

    def take(self, request: worker_service_pb2.HeartbeatRequest) -> bool:
        """Store a worker's report as its last one; return whether something changed that others may wait for."""
        before = self._essence()
        self._request = request
        self.num_playing, self.is_leaving = request.num_playing, request.is_leaving
        if request.HasField("trainer"):
            self.trainer = request.trainer
        if request.HasField("policy"):
            self.policy = request.policy
        return self._essence() != before

    def _essence(self) -> tuple[object, ...]:
        """Return the part of the last report that others may wait for: no counts, ages or durations."""
        policy = self.policy
        served = policy and (policy.run_uid, policy.state, policy.lineage, policy.version, policy.has_version)
        state = policy and (policy.is_asleep, policy.is_damaged, policy.error)
        return self.is_leaving, self.trainer, served, state

    @property
    def waits(self) -> list[Wait]:
        """Return what the worker waited for at its last report."""
        return from_proto(self._request.waits[:MAX_WAITS])

    def is_troubled(self, age_s: float) -> bool:
        """Return whether the last report, made `age_s` seconds ago, has a wait that is refused or overdue by now."""
        return any(
            wait.HasField("refusal") or 0 < wait.deadline_seconds < wait.age_seconds + age_s
            for wait in self._request.waits
        )

    @property
    def gpus(self) -> list[GpuUse]:
        """Return the use of the devices that the worker may use, as last reported."""
        return gpus_from_proto(self._request.gpus)

    @property
    def accelerators(self) -> int:
        """Return how many accelerators the worker uses: a trainer's ranks, the GPUs of another one, and 1 without."""
        return max(1, self.worker.num_ranks or len(self._request.gpus))

    @property
    def silent_since(self) -> float:
        """Return the monotonic time from which the worker's silence counts: when its next heartbeat was due, less
        `HEARTBEAT_S`.
        """
        return self.last_seen + max(0.0, self.interval_s - HEARTBEAT_S)

    @property
    def takes_work(self) -> bool:
        """Return whether the worker may get new work: it is neither leaving nor silent."""
        return not self.is_leaving and time.monotonic() - self.silent_since <= QUIET_S

    @property
    def lease_ends(self) -> float:
        """Return the monotonic time at which the worker counts as lost, unless it is heard before."""
        return self.silent_since + (LEAVING_LEASE_S if self.is_leaving else LEASE_S)

    @property
    def reported(self) -> str:
        """Return the uid of the run that a trainer reports as unfinished; empty for other workers."""
        return self.trainer.run_uid if self.trainer is not None and not self.trainer.is_finished else ""

    @property
    def served(self) -> str:
        """Return the uid of the run whose policy a replica reports; empty for other workers."""
        return self.policy.run_uid if self.policy is not None else ""

    async def hold(self, longest_s: float) -> None:
        """Wait until there is news for the worker, `longest_s` seconds at most, and mark the news as answered."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self.news.wait()
        self.news.clear()

    def reports(self, run_uid: str) -> bool:
        """Return whether the worker is a trainer whose last report is of the run, finished or not."""
        return self.trainer is not None and self.trainer.run_uid == run_uid

    def is_over(self, run_uid: str) -> bool:
        """Return whether the worker is a trainer that reports the run as finished or given up."""
        status = self.trainer
        return status is not None and status.run_uid == run_uid and (status.is_finished or bool(status.error_reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Retired:
    """A run that workers shall release, until when answers name it, and whether it has ended."""

    until: float
    has_ended: bool


class WorkerRegistry:
    """Registered workers by id; `changed` wakes those that wait for a worker or its report.

    Most heartbeats change nothing and wake nobody. `keep_pulse` looks for workers that fell silent. A worker that
    is silent is lost only if others were heard meanwhile: where this process itself is late, all heartbeats wait
    for it.
    """

    def __init__(self) -> None:
        """Make an empty registry."""
        self.by_id: dict[str, WorkerRecord] = {}
        self._slots: dict[str, WorkerRecord] = {}
        self._lists: dict[tuple[WorkerKind, str | None], list[WorkerRecord]] = {}
        self._round, self._round_began = 0, 0.0
        self._heard_in_round: set[str] = set()
        self._num_expected = 0
        """Workers that were neither silent nor leaving when the round began."""
        self._heard, self._look_at = 0.0, 0.0
        self._quiet: set[str] = set()
        self._resolved_below: dict[str, int] = {}
        self._log_instances: dict[str, str] = {}
        self._damaged: dict[str, tuple[policy_pb2.PolicyEntry, int]] = {}
        self._lent: dict[str, tuple[str, int]] = {}
        self._retired: dict[str, _Retired] = {}
        self._reserved = set[str]()
        """Runs whose lease this orchestrator tries to get: workers that do not report them do not hear of them."""
        self.limits = Limits()
        self.on_lost: list[Callable[[WorkerRecord, str], None]] = []
        """Called with each worker that is gone, and the reason: `WORKER_LOST` or `WORKER_REPLACED`."""
        self._pulse = 0.0
        self.lost: dict[str, WorkerRecord] = {}
        """Workers whose lease ran out and that did not come back, as they were; the newest `MAX_LOST`."""
        self._names = WorkerNames()
        self.going_on = frozenset[str]()
        """Runs of the deployment that are neither queued, paused nor ended, whichever orchestrator drives them."""
        self.stood_still_s = 0.0
        """Seconds for which this process itself was stopped or starved, over its life: nobody else is to blame."""
        self.changed = asyncio.Event()
        self.revision = 0
        """How often `changed` was set."""

    def register(self, worker: worker_service_pb2.Worker) -> WorkerRecord:
        """Register a worker, or replace its description; return its record.

        A worker that had the same slot is removed: it is dead. CapacityError if `MAX_WORKERS` others are registered.
        """
        # It was only silent, and is back.
        self.lost.pop(worker.worker_id, None)
        self._replace_slot(worker)
        known = self.by_id.get(worker.worker_id)
        if known is None and len(self.by_id) >= MAX_WORKERS:
            raise CapacityError(
                f"{MAX_WORKERS} workers are registered already",
                reason="REGISTRY_FULL",
                remedy="end those that are not needed, or start a deployment of its own",
            )
        if known is None:
            known = self.by_id[worker.worker_id] = WorkerRecord(worker=worker, last_seen=time.monotonic())
            logger.info("worker registered", extra={"worker": worker.worker_id, "address": worker.address})
        else:
            self._slots.pop(known.worker.slot, None)
            known.worker, known.kind = worker, KINDS[worker.kind]
        if worker.slot:
            self._slots[worker.slot] = known
        self._lists.clear()
        known.last_seen, known.round, known.interval_s = time.monotonic(), self._round, self.interval_s(known.kind)
        self._look_at = min(self._look_at, known.lease_ends)
        self.notify()
        return known

    def heartbeat(self, request: worker_service_pb2.HeartbeatRequest) -> WorkerRecord | None:
        """Store a worker's report and return its record, None if the worker is not registered.

        Waiters are woken if the report has news.
        """
        record = self.by_id.get(request.worker_id)
        if record is None:
            return None
        was_quiet = not record.is_leaving and not record.takes_work
        self._hear(record)
        has_news = record.take(request)
        if record.is_leaving:
            self._look_at = min(self._look_at, record.lease_ends)
        # Who looked while it was silent left it out, perhaps before the next pulse.
        if has_news or was_quiet or record.worker_id in self._quiet:
            self._quiet.discard(record.worker_id)
            self.notify()
        return record

    def _hear(self, record: WorkerRecord) -> None:
        """Note that a worker's heartbeat came now, choose its next interval, and begin the next round if this one is
        over.
        """
        now = record.last_seen = self._heard = time.monotonic()
        # Heard twice: heartbeats of a whole interval were taken, and those sent before have had a turn.
        is_second = record.worker_id in self._heard_in_round
        has_half = len(self._heard_in_round) >= self._num_expected // 2 and now - self._round_began >= HEARTBEAT_S / 2
        if is_second and (has_half or now - self._round_began > LEASE_S):
            self._round, self._round_began = self._round + 1, now
            self._num_expected = sum(each.takes_work for each in self.by_id.values())  # not those that may be dead
            self._heard_in_round.clear()
        self._heard_in_round.add(record.worker_id)
        record.round = self._round
        record.interval_s = self.interval_s(record.kind)

    def interval_s(self, kind: WorkerKind) -> float:
        """Return the seconds between two heartbeats of a worker of a kind.

        It grows with the number of workers, but not for trainers: others wait for the steps and turns that they report.
        Where it has grown it varies by `INTERVAL_SPREAD`: heartbeats that were answered together, after this process
        was late, would else come together again each time.
        """
        mean_s = len(self.by_id) / HEARTBEATS_PER_S
        if kind is WorkerKind.TRAINER or mean_s <= HEARTBEAT_S:
            return HEARTBEAT_S
        return max(HEARTBEAT_S, mean_s * random.uniform(*INTERVAL_SPREAD))

    def alive(self, kind: WorkerKind) -> Sequence[WorkerRecord]:
        """Return the workers of a kind whose lease holds, in order of id; callers must not change the list."""
        return self._list(kind, None)

    def _list(self, kind: WorkerKind, run_uid: str | None) -> Sequence[WorkerRecord]:
        """Return the workers of a kind that are given to a run, or all if it is None, in order of id.

        The list is cached and shared, so that callers must not change it.
        """
        self._expire()
        found = self._lists.get((kind, run_uid))
        if found is None:
            of_kind = (record for record in self.by_id.values() if record.kind is kind)
            mine = (record for record in of_kind if run_uid is None or record.run_uid == run_uid)
            found = self._lists[kind, run_uid] = sorted(mine, key=lambda record: record.worker_id)
        return found

    def accepting(self, kind: WorkerKind) -> list[WorkerRecord]:
        """Return the workers of a kind that take work, in order of id."""
        return [record for record in self.alive(kind) if record.takes_work]

    def owned(self, kind: WorkerKind, run_uid: str) -> Sequence[WorkerRecord]:
        """Return the workers of a kind that are assigned to a run ("": to none), in order of id.

        The list must not be changed.
        """
        return self._list(kind, run_uid)

    def _give(self, record: WorkerRecord, run_uid: str) -> None:
        """Assign a worker to a run, and answer its waiting heartbeat; an empty `run_uid` makes it free."""
        record.run_uid = run_uid
        record.news.set()
        self._lists.clear()

    def free_for(self, kind: WorkerKind, run_uid: str, *, fresh: bool = False) -> list[WorkerRecord]:
        """Return the workers of a kind that a run may be given, first those that have it already and keep its state.

        A worker that reports another run is not free, a replica for `HOME_S` if that run goes on. With `fresh`, neither
        is a trainer that reports how the run ended for it: that may be from before a reopening, and a trainer without
        an assignment forgets it.
        """
        reported = {"", run_uid} - self._retired.keys()  # the trainer of a run that paused lets it go first
        free = [record for record in self.owned(kind, "") if record.takes_work and record.reported in reported]
        free = [each for each in free if not (fresh and each.is_over(run_uid)) and not self._has_home(each, run_uid)]
        # False sorts first.
        return sorted(free, key=lambda record: run_uid not in (record.reported, record.served))

    def claim(self, kind: WorkerKind, run_uid: str, *, limit: int | None = None, fresh: bool = False) -> int:
        """Assign free workers of a kind (`free_for`) to a run, up to `limit`; return how many it has then.

        `limit` None is all that are free; of replicas what the run's share and the queue's limits leave. Workers that
        are leaving do not count.
        """
        self._retired.pop(run_uid, None)
        mine = [record for record in self.owned(kind, run_uid) if not record.is_leaving]
        free = self.free_for(kind, run_uid, fresh=fresh)
        if limit is None and kind is WorkerKind.INFERENCE and free:
            replicas = self.alive(WorkerKind.INFERENCE)
            others = (record.run_uid for record in (*replicas, *self.alive(WorkerKind.TRAINER)))
            limit = self.limits.share(run_uid, others, len(replicas))
            kept = {each.worker_id for each in self.free_for(kind, self.limits.head)[: self.limits.kept_from(run_uid)]}
            free = self.limits.allowed(run_uid, free, num_replicas=len(mine), held=self.held(), kept=kept)
        taken = free if limit is None else free[: max(0, limit - len(mine))]
        for record in taken:
            self._give(record, run_uid)
        return len(mine) + len(taken)

    def held(self) -> list[GivenWorker]:
        """Return the trainers and replicas that are given to runs."""
        given = (each for each in self.by_id.values() if each.run_uid)
        return [GivenWorker(each.run_uid, each.kind is WorkerKind.INFERENCE, each.accelerators) for each in given]

    def give(self, run_uid: str, worker_ids: Iterable[str], terms: Terms) -> None:
        """Assign all of these free workers to a run, under the queue's terms."""
        self._retired.pop(run_uid, None)
        self.limits.admit(run_uid, terms)
        for worker_id in worker_ids:
            self._give(self.by_id[worker_id], run_uid)

    def reserve(self, run_uid: str) -> None:
        """Send the run's workers no assignment until `announce`: another orchestrator may hold the run's lease.

        A trainer that already reports the run gets its assignment at once.
        """
        self._reserved.add(run_uid)

    def announce(self, run_uid: str) -> None:
        """Tell a reserved run's workers of their assignment: this orchestrator holds the lease of the run."""
        if run_uid in self._reserved:
            self._reserved.discard(run_uid)
            for record in self.by_id.values():
                if record.run_uid == run_uid:
                    record.news.set()

    def _has_home(self, record: WorkerRecord, run_uid: str) -> bool:
        """Return whether a replica registered less than `HOME_S` ago and serves a run that goes on, other than
        `run_uid`.

        The orchestrator of that run may just have died: the replica is left to the one that takes the run over.
        """
        return record.served in self.going_on - {run_uid} and time.monotonic() - record.registered < HOME_S

    def release(self, run_uid: str) -> None:
        """Free all workers of a run that is no longer driven here, and forget what was still to be sent to them.

        The run may go on under another orchestrator.
        """
        for record in self.by_id.values():
            if record.run_uid == run_uid:
                self._give(record, "")
        self._reserved.discard(run_uid)
        self.limits.forget(run_uid)
        self._resolved_below.pop(run_uid, None)
        self._log_instances.pop(run_uid, None)
        self._damaged.pop(run_uid, None)
        self._lent.pop(run_uid, None)
        self.notify()

    def give_back(self, kind: WorkerKind, run_uid: str) -> None:
        """Free the run's workers of a kind while this orchestrator still drives the run, which may claim others or
        these again.
        """
        for record in self.owned(kind, run_uid):
            self._give(record, "")
        self.notify()

    def goes_on(self, run_uid: str) -> None:
        """Stop asking workers to release a run, because it was resumed."""
        self._retired.pop(run_uid, None)

    def retire(self, run_uid: str, *, has_ended: bool) -> None:
        """Have heartbeats ask workers for `RETIRED_S` to release a run, because it has ended (`has_ended`) or is
        paused.
        """
        self._retired.pop(run_uid, None)
        # At the end of the dictionary, whose first entries are dropped when there are too many.
        self._retired[run_uid] = _Retired(until=time.monotonic() + RETIRED_S, has_ended=has_ended)
        while len(self._retired) > MAX_RETIRED:
            del self._retired[next(iter(self._retired))]
        for record in self.by_id.values():
            record.news.set()
        self.notify()

    def set_watermark(self, run_uid: str, resolved_below: int) -> None:
        """Set the ordinal below which every ordinal of the run is resolved; heartbeats pass it to the run's workers.

        Workers are no longer asked to release the run.
        """
        self._resolved_below[run_uid] = resolved_below
        self._retired.pop(run_uid, None)

    def set_log_instance(self, run_uid: str, log_instance: str) -> None:
        """Set the id of the copy of the run's log that Redis holds; heartbeats pass it to the run's workers."""
        self._log_instances[run_uid] = log_instance

    def report_damage(self, run_uid: str, policy: policy_pb2.PolicyEntry) -> None:
        """Count once more that a replica found a policy damaged.

        Heartbeats pass policy and count to the run's trainer.
        """
        _, count = self._damaged.get(run_uid, (policy, 0))
        self._damaged[run_uid] = policy, count + 1

    def lend_devices(self, run_uid: str, trainer_id: str, turn: int) -> None:
        """Give a trainer of the run the turn with this number on the devices that it shares with replicas.

        The answer to its heartbeat, which does not wait then, has the number.
        """
        if self._lent.get(run_uid) == (trainer_id, turn):
            return
        self._lent[run_uid] = trainer_id, turn
        if (record := self.by_id.get(trainer_id)) is not None:
            record.news.set()

    def lent_turn(self, run_uid: str) -> tuple[str, int]:
        """Return the id of the run's trainer that has the devices, and the number of its turn; ("", 0) if none has."""
        return self._lent.get(run_uid, ("", 0))

    def take_devices(self, run_uid: str) -> None:
        """End the turn that a trainer of the run has on the devices."""
        self._lent.pop(run_uid, None)

    def assignments(self, record: WorkerRecord) -> Iterator[worker_service_pb2.Assignment]:
        """Yield the assignments of a worker: of the run that it works on or, for an env-server, of all driven runs.

        An env-server also gets the runs that ended within `RETIRED_S`, as over. A reserved run is left out.
        """
        env_server = record.kind is WorkerKind.ENV_SERVER
        if record.run_uid in self._reserved and not record.reports(record.run_uid):
            return
        for run_uid in list(self._resolved_below) if env_server else filter(None, [record.run_uid]):
            holder, turn = self.lent_turn(run_uid)
            damaged, num_reports = (None, 0) if env_server else self._damaged.get(run_uid, (None, 0))
            yield worker_service_pb2.Assignment(
                run_uid=run_uid,
                resolved_below=self._resolved_below.get(run_uid, 0),
                log_instance=self._log_instances.get(run_uid, ""),
                damaged_policy=damaged,
                num_damage_reports=num_reports,
                device_turn=turn if holder == record.worker_id else 0,
            )
        for run_uid in self.retired_runs() if env_server else ():
            if self._retired[run_uid].has_ended and run_uid not in self._resolved_below:
                yield worker_service_pb2.Assignment(run_uid=run_uid, is_over=True)

    def retired_runs(self) -> list[str]:
        """Return the uids of the runs that were paused or ended within the last `RETIRED_S`, and forget earlier
        ones.
        """
        now = time.monotonic()
        self._retired = {run_uid: retired for run_uid, retired in self._retired.items() if retired.until > now}
        return list(self._retired)

    def notify(self) -> None:
        """Wake everyone who waits on `changed`, and replace that event."""
        self.revision += 1
        self.changed.set()
        self.changed = asyncio.Event()

    def records(self) -> list[WorkerRecord]:
        """Return every registered worker, also one whose lease has run out since the last look."""
        return list(self.by_id.values())

    def names(self) -> dict[str, str]:
        """Return a short name for each registered worker, such as `trainer-1`, by its id."""
        return self._names.of(Numbered(each.worker_id, each.kind, each.worker.slot) for each in self.by_id.values())

    async def keep_pulse(self) -> None:
        """Look for workers that fell silent until cancelled.

        Time in which this process did not run is added to the times at which workers were heard last: else an
        orchestrator that was stopped would lose every worker as soon as it goes on.
        """
        self._pulse = time.monotonic()
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            await asyncio.sleep(PULSE_S)
            now = time.monotonic()
            gap_s = now - self._pulse - PULSE_S
            self._pulse = now
            if gap_s > STOOD_STILL_S:
                self.stood_still_s += gap_s
                logger.warning("this process stood still", extra={"seconds": round(gap_s, 1)})
                for record in self.by_id.values():
                    # Not beyond now: a heartbeat may have come in since the gap.
                    record.last_seen = min(now, record.last_seen + gap_s)
                self.notify()  # somebody may have looked before the times were corrected, and left workers out
            self._expire()
            quiet = {name for name, record in self.by_id.items() if now - record.silent_since > QUIET_S}
            new, self._quiet = quiet - self._quiet, quiet
            if new:
                self.notify()

    def _expire(self) -> None:
        """Remove the workers whose lease has run out, which counts as a loss.

        Nothing before the first lease can run out.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        if self._pulse and now - self._pulse > PULSE_S + STOOD_STILL_S:
            return  # we stood still and `keep_pulse` has not run since: nobody's silence is known
        for record in list(self.by_id.values()):
            if now > record.lease_ends and self._is_own_silence(record, now):
                seconds = round(now - record.last_seen, 1)
                fields = {"worker": record.worker_id, "seconds": seconds, "run": record.run_uid}
                logger.warning("worker lost: no heartbeat", extra=fields)
                self.lost[record.worker_id] = record
                # A dictionary keeps the order of insertion, so the first one is the oldest.
                while len(self.lost) > MAX_LOST:
                    del self.lost[next(iter(self.lost))]
                self._remove(record, "WORKER_LOST")
        ends = min((record.lease_ends for record in self.by_id.values()), default=now)
        # Not at every call: with thousands of workers each look costs milliseconds.
        self._look_at = max(ends, now + LOOK_S)

    def _is_own_silence(self, record: WorkerRecord, now: float) -> bool:
        """Return whether a heartbeat of this worker would have been processed by now, had it sent one.

        Heartbeats that wait for this process are processed in turn. So the worker's own does not wait if others
        were heard several times since, or if nobody was heard for long.
        """
        return self._round - record.round >= LOST_ROUNDS or now - self._heard > LEAVING_LEASE_S

    def _replace_slot(self, worker: worker_service_pb2.Worker) -> None:
        """Remove the worker that is registered for the slot of `worker`: it is dead, since its successor has the
        slot.
        """
        record = self._slots.get(worker.slot)
        if record is not None and record.worker_id != worker.worker_id:
            fields = {"worker": record.worker_id, "by": worker.worker_id, "slot": worker.slot}
            logger.warning("worker replaced by its successor", extra=fields | {"run": record.run_uid})
            self._remove(record, "WORKER_REPLACED")

    def _remove(self, record: WorkerRecord, reason: str) -> None:
        """Remove a worker, wake waiters, and call `on_lost` with the reason."""
        del self.by_id[record.worker_id]
        if self._slots.get(record.worker.slot) is record:
            del self._slots[record.worker.slot]
        self._lists.clear()
        self.notify()
        for callback in self.on_lost:
            callback(record, reason)
