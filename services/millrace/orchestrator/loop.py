"""The loop that drives one claimed run.

    tasks ──(admitted?)──▶ dispatcher ──PlayGroup──▶ env-server ──HTTP──▶ inference
                               ▲                         │ rollout stream        ▲
       open + finished < (v + L + 1 - c)·G·f             ▼                       │ UpdatePolicy(newest)
                               │            collect: members → whole groups   policies ◀── policy stream ◀── trainer
                               │                         ▼                                                      ▲
                               └──────── c += 1 ◀── cut: G eligible groups → advantages → commit ──▶ batch stream

| part       | waits for                                  | unblocked by                          |
|------------|--------------------------------------------|---------------------------------------|
| admission  | room under the formula above               | a cut step, a newly served version    |
| collect    | the rollout stream                         | env-servers                           |
| cut        | G finished groups that are fresh enough    | collect                               |
| policies   | the policy stream, then each replica       | the trainer, then the replica         |
| finish     | version `max_steps`, the last evaluation   | the trainer                           |

Components do not know the loop; the loop holds them and moves groups between them. The admission formula and its proof
stand in `admission.py`, the rules for whole groups in `groups.py`, the commit of a step in `ledger.py`. The collector
calls `add` between any two awaits of the loop, so a group may finish or be dropped while the loop waits for an answer.
Nothing is played again before the stream was read to its end: what the log holds is never generated twice.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from millrace.algorithms import Algorithm
from millrace.orchestrator.admission import AdmissionRule
from millrace.orchestrator.batcher import cut
from millrace.orchestrator.dispatcher import Dispatcher
from millrace.orchestrator.events import RunEvents
from millrace.orchestrator.groups import Arrival, Group, GroupTable
from millrace.orchestrator.ledger import Ledger
from millrace.orchestrator.policy_driver import PolicyDriver
from millrace.orchestrator.rollout_stream import RolloutStream
from millrace.orchestrator.run_meters import RunMeters
from millrace.orchestrator.tasks import TaskOrder
from millrace.rollouts.types import Rollout, RolloutStatus
from millrace.telemetry import faults
from millrace.telemetry.waits import LastingWait

TICK_S = 1.0
"""Longest pause between two looks at lost groups and requests to stop if nothing else wakes the loop."""
SLOW_S = 600.0
"""Age from which a wait for a replica or for the trainer is overdue: either may be loading a large model."""
DRAIN_S = 30.0
"""How long a pause lets open groups finish; the rest is cancelled and played again after the pause."""
STALE_STEPS_BEFORE_WARNING = 2
"""Steps' worth of groups dropped as stale in a row before an event says so."""


@dataclass(slots=True, kw_only=True)
class RolloutLoop:
    """Admission, collection and cutting for the steps of one run."""

    max_steps: float
    rule: AdmissionRule
    make_group: Callable[[int, int], Group]
    """From ordinal and planned step to an open group."""
    tasks: TaskOrder
    table: GroupTable
    stream: RolloutStream
    dispatcher: Dispatcher
    policies: PolicyDriver
    ledger: Ledger
    events: RunEvents
    algorithm: Algorithm
    filter_zero_advantages: bool
    seq_len: int
    changed: asyncio.Event
    is_stopping: Callable[[], bool]
    """Whether the run was asked to pause or to end."""
    meters: RunMeters = field(default_factory=lambda: RunMeters(""))
    wait: LastingWait = field(default_factory=LastingWait)
    num_stale_in_a_row: int = 0

    async def run(self) -> None:
        """Cut and commit batches until `max_steps` or until the run is asked to stop."""
        try:
            while self.ledger.step < self.max_steps and not self.is_stopping():
                self.changed.clear()
                await self.drop_stale()
                await self.place_open()
                await self.admit()
                if groups := self.take():
                    self.wait.over()
                    await self.commit(groups)
                else:
                    await self.wait_for_change()
        finally:
            self.wait.over()

    async def admit(self) -> None:
        """Start new groups while there is room and somebody to play them."""
        while (served := self.policies.served_version()) is not None:
            room = self.rule.num_allowed(step=self.ledger.step, served_version=served)
            if len(self.table) >= room:
                return
            planned = self.rule.planned_step(step=self.ledger.step, num_ahead=len(self.table))
            group = self.make_group(self.ledger.next_ordinal(self.table), planned)
            self.table.open[group.ordinal] = group
            if not await self.place(group):
                return  # it stays open, and `place_open` tries again

    async def place_open(self) -> None:
        """Play again, as the next attempt, what was lost with an env-server or a replica; place what nobody plays."""
        if lost := [(group, group.attempt) for group in self.dispatcher.lost(self.table)]:
            await self.dispatcher.stop([group for group, _ in lost])
            await self.stream.catch_up()  # a new attempt of a group that is scored whole begins from nothing
            for group, attempt in lost:
                if group.ordinal in self.table.open and group.attempt == attempt:
                    group.next_attempt(is_lost=True)  # else it became whole, was dropped, or failed meanwhile
        now = time.monotonic()
        unplaced = [group for group in self.table.open.values() if not group.env_server and group.not_before <= now]
        if any(group.attempt for group in unplaced):
            await self.stream.catch_up()
        for group in unplaced:
            if group.ordinal in self.table.open and not group.env_server and not await self.place(group):
                return

    async def place(self, group: Group) -> bool:
        """Dispatch a group's missing members to a replica that is new enough for its planned step."""
        min_version = self.rule.min_version(planned_step=group.planned_step)
        return await self.dispatcher.dispatch(group, self.table, min_version=min_version)

    def add(self, rollout: Rollout) -> None:
        """Take one rollout of the stream: the collector calls this for every entry, once."""
        group = self.table.open.get(rollout.ordinal)
        if group is not None and rollout.status == RolloutStatus.ENGINE_LOST and rollout.attempt == group.attempt:
            self.policies.suspect(group.replica)
        arrival = self.table.add(rollout)
        if arrival is not Arrival.DUPLICATE:
            self.meters.rollout(rollout)
        if group is not None and arrival is Arrival.HOPELESS:
            self.ledger.drop(group, self.table, reason=group.failure_reason())
        elif group is not None and arrival is Arrival.RETRY:
            is_lost = any(failure.status == RolloutStatus.ENGINE_LOST for failure in group.failures.values())
            group.next_attempt(is_lost=is_lost)
        elif arrival is Arrival.FINISHED:
            faults.reach(faults.Point.ORCHESTRATOR_AFTER_ROLLOUTS, step=self.ledger.step)
        if arrival is not Arrival.OPEN:
            self.changed.set()

    async def drain(self) -> None:
        """Before a pause: let open groups finish for a while; what is whole or finished in part stays in the log."""
        try:
            async with asyncio.timeout(DRAIN_S):
                while any(group.env_server for group in self.table.open.values()):
                    self.changed.clear()
                    count = len(self.table.open)
                    self.wait.on(f"{count} open groups before the pause", waits_on="env-server", key="drain")
                    await self.tick()
        except TimeoutError:
            return
        finally:
            self.wait.over()

    async def drop_stale(self) -> None:
        """Drop every group that can no longer be trained, so that it never holds a slot."""
        stale = [group for group in self.table if not self.is_eligible(group)]
        if stale:
            await self.ledger.drop_all(stale, self.table, reason="stale")
        before = self.num_stale_in_a_row
        self.num_stale_in_a_row += len(stale)
        threshold = STALE_STEPS_BEFORE_WARNING * self.rule.groups_per_step
        if before // threshold < self.num_stale_in_a_row // threshold:
            await self.events.warning(
                "GROUPS_STALE",
                f"{self.num_stale_in_a_row} groups in a row were dropped as stale before batch {self.ledger.step}: "
                "inference is slower than the trainer; add replicas, or raise orchestrator.max_off_policy_steps",
            )

    def is_eligible(self, group: Group) -> bool:
        """Whether the group may still be trained at the step that is cut next."""
        oldest = group.min_policy_version
        return oldest is None or self.rule.is_eligible(step=self.ledger.step, min_policy_version=oldest)

    def take(self) -> list[Group]:
        """The groups of the next batch in order of arrival, or nothing if there are not enough."""
        served, need = self.policies.served_version(), self.rule.groups_per_step
        if served is None or not self.rule.may_cut(step=self.ledger.step, served_version=served):
            return []
        ready = [group for group in self.table.finished.values() if self.is_eligible(group)]
        return ready[:need] if len(ready) >= need else []

    async def commit(self, groups: list[Group]) -> None:
        """Turn groups into batch n and commit it; at async level 0 what is left over is dropped."""
        batch = cut(
            groups,
            self.algorithm,
            step=self.ledger.step,
            filter_zero_advantages=self.filter_zero_advantages,
            seq_len=self.seq_len,
        )
        if self.rule.async_level == 0:
            surplus = [group for group in self.table if group not in groups]
            await self.ledger.drop_all(surplus, self.table, reason="surplus")
        await self.ledger.commit(batch, self.table)
        if self.ledger.step > batch.step:  # else no group had an advantage, and nothing is trained
            self.meters.trained(groups, step=batch.step)
        self.num_stale_in_a_row = 0

    async def wait_for_change(self) -> None:
        """Sleep until a group finishes, a version is served or a worker changes; the wait has a name and an age."""
        step, have, need = self.ledger.step, len(self.table.finished), self.rule.groups_per_step
        if self.policies.served_version() is None:
            self.wait.on(
                "a replica that serves this run's policy", waits_on="inference", key="replica", deadline_s=SLOW_S
            )
        elif have < need and self.table.open:
            reason = f"{need - have} of {need} groups for batch {step}"
            timeout_s = self.dispatcher.timeout_s
            self.wait.on(reason, waits_on="env-server", key=f"groups {step}", deadline_s=timeout_s)
        else:
            version = step - self.rule.async_level
            up_to = self.policies.up_to(version)
            self.wait.on(f"policy {version} to be served", waits_on=up_to, key=f"policy {version}", deadline_s=SLOW_S)
        await self.tick()

    async def tick(self) -> None:
        """Sleep until something changes, or for `TICK_S`."""
        try:
            async with asyncio.timeout(TICK_S):
                await self.changed.wait()
        except TimeoutError:
            return
