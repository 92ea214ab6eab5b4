"""The loop that drives one claimed run.

    tasks ──(admitted?)──▶ player ────PlayGroup────▶ env-server ──HTTP──▶ inference
                               ▲                         │ rollout stream        ▲
       open + finished < (v + L + 1 - c)·B·f             ▼                       │ UpdatePolicy(newest)
                               │            collect: members → whole groups   policies ◀── policy stream ◀── trainer
                               │                         ▼                                                      ▲
                               └──────── c += 1 ◀── cut: B eligible rollouts → advantages → commit ──▶ batch stream

| part       | waits for                                  | unblocked by                          |
|------------|--------------------------------------------|---------------------------------------|
| admission  | room under the formula above               | a cut step, a newly served version    |
| collect    | the rollout stream                         | env-servers                           |
| cut        | B rollouts of groups that are fresh enough | collect                               |
| policies   | the policy stream, then each replica       | the trainer, then the replica         |
| finish     | version `max_steps`, the last evaluation   | the trainer                           |

Components do not know the loop; the loop holds them and moves groups between them. The admission formula and its proof
are in `play/routing.py`, the rules for whole groups in `play/play.py`, what is open and what is resolved in
`play/book.py`, the commit of a step in `batch_writer.py`. Rollouts are taken between any two awaits of the loop, so a
group may finish or be dropped while the loop waits for an answer. Nothing is played again before the stream was read to
its end: what the log holds is never generated twice.
"""

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from millrace.algorithms import Algorithm, RewardRanges, count_found
from millrace.config import OrchestratorConfig
from millrace.errors import InternalError, InvalidStateError
from millrace.orchestrator.drive.batch_metrics import BatchWarnings, Durations, batch_metrics
from millrace.orchestrator.drive.batch_writer import BatchWriter, cut, teaches
from millrace.orchestrator.events import RunEvents
from millrace.orchestrator.play.book import Book
from millrace.orchestrator.play.failures import Failures, by_status
from millrace.orchestrator.play.intake import Draw, ExpertsCheck, MakePlay, draw_nothing
from millrace.orchestrator.play.play import Play, PlayState, num_rollouts
from millrace.orchestrator.play.player import Player
from millrace.orchestrator.play.routing import AdmissionRule, Policies
from millrace.race import in_own_thread
from millrace.runlog.run_status import MUCH
from millrace.telemetry.waits import LastingWait, Refusal, waiting

T = TypeVar("T")

TICK_S = 1.0
"""Longest pause between two looks at lost groups and requests to stop if nothing else wakes the loop."""
REST_S = 50e-6
"""Pause for each play after a look at all of them, so that looks at thousands of plays do not fill the event loop.
What changes meanwhile is seen in the next look."""
SLOW_S = 600.0
"""Age from which a wait for a replica or for the trainer is overdue: either may be loading a large model. Also that of
the wait for the advantages of a batch, which a function of the user's may compute."""
DRAIN_S = 30.0
"""How long a pause lets open groups finish; the rest is cancelled and played again after the pause."""
WINDOW_STEPS, MIN_WINDOW = 8, 32
"""Window for reported shares: groups of that many steps, and at least that many groups."""


@dataclass(slots=True, kw_only=True)
class RolloutLoop:
    """Admission, collection and cutting for the steps of one run."""

    max_steps: float
    rule: AdmissionRule
    make_play: MakePlay
    book: Book
    failures: Failures
    player: Player
    policies: Policies
    writer: BatchWriter
    events: RunEvents
    algorithms: Mapping[str, Algorithm]
    """By name of the environment."""
    settings: OrchestratorConfig
    timeout_s: float
    """Time after which a play counts as lost."""
    is_stopping: Callable[[], bool]
    """Whether the run was asked to pause or to end."""
    draw: Draw = draw_nothing
    """Draws the tasks of ordinals before `make_play` makes their plays."""
    is_exhausted: Callable[[int], bool] = lambda ordinal: False
    """Whether an ordinal has no task left to draw."""
    wait: LastingWait = field(default_factory=LastingWait)
    durations: Durations = field(init=False)
    num_stale_reported: dict[str, int] = field(default_factory=dict)
    """By environment, the number of stale groups in the last event about them."""
    committing: asyncio.Task[None] | None = None
    """The commit that is under way."""
    batch: list[Play] = field(default_factory=list)
    """Its groups."""
    batch_step: int = 0
    """Its step."""
    num_equal_in_a_row: int = 0
    teaching: set[int] = field(default_factory=set)
    """Ordinals of whole groups that are kept; filled only where batches are refilled."""
    filtered_in_a_row: Counter[str] = field(default_factory=Counter)
    """Why groups were replaced since one was kept."""
    full_spool: Callable[[], Refusal | None] = lambda: None
    """Returns the refusal of a spool that one run fills, if that is why the last group was not taken."""
    experts: ExpertsCheck | None = None
    """Which recorded experts the intake refuses; None if it refuses none."""
    warnings: BatchWarnings = field(init=False)
    ranges: RewardRanges = field(init=False)

    def __post_init__(self) -> None:
        self.warnings = BatchWarnings(self.settings, self.events, experts=self.experts)
        self.ranges = RewardRanges.of(self.settings.env)
        self.durations = Durations(window=max(WINDOW_STEPS * self.settings.groups_per_step, MIN_WINDOW))

    async def run(self) -> None:
        """Play groups, and cut and commit batches, until `max_steps` or until the run is asked to stop."""
        try:
            while self.book.step < self.max_steps and not self.is_stopping():
                # Cleared before the look: a change during the look sets it again, so `tick` returns at once.
                self.book.changed.clear()
                await self.end_commit()
                await self.report_failures()
                await self.drop_stale()
                await self.drop_equal()
                # Before `admit`: plays that were admitted already, and were lost or not taken, get the room first.
                await self.player.place_open(self.book.plays.values())
                await self.admit()
                if self.committing is None and (groups := self.take()):
                    self.begin_commit(groups)
                else:
                    await self.wait_for_change()
            await self.end_commit(waits=True)
        finally:
            self.wait.over()
            if self.committing is not None:
                # The batch writer finishes a commit that is under way before it lets the cancellation through.
                self.committing.cancel()
                await asyncio.wait((self.committing,))

    def begin_commit(self, groups: list[Play]) -> None:
        """Begin to commit the batch of `groups` in the background, while other groups are sent out and finish.

        The next batch is cut when the commit is done.
        """
        self.batch, self.batch_step = groups, self.book.step
        self.committing = asyncio.create_task(self.commit(groups))
        # The loop waits on the book: the end of the commit has to wake it.
        self.committing.add_done_callback(lambda _: self.book.changed.set())

    async def end_commit(self, *, waits: bool = False) -> None:
        """Finish the commit that `begin_commit` began, if it is done; raise its error.

        With `waits` wait until it is done.
        """
        if self.committing is not None and (waits or self.committing.done()):
            await self.committing
            self.batch, self.committing = [], None

    @property
    def ahead(self) -> tuple[int, int]:
        """Return the step that is cut next, and the number of rollouts that are open or finished and in no batch.

        A batch that is being committed counts as committed: what is sent out meanwhile can only be trained in a later
        step.
        """
        if self.committing is None:
            return self.book.step, num_rollouts(self.book.plays.values())
        taken = {group.ordinal for group in self.batch}
        return self.batch_step + 1, num_rollouts(each for each in self.book.plays.values() if each.ordinal not in taken)

    async def report_failures(self) -> None:
        """Write events on failed and lost rollouts that are due; raise RolloutsFailedError if the run cannot learn."""
        for count in self.failures.report():
            await self.events.rollouts_failed(count)
        if outage := self.failures.outage_report():
            await self.events.warning("ROLLOUTS_LOST", outage)
        if error := self.failures.error():
            raise error

    async def admit(self) -> None:
        """Start new groups while there is room and an env-server for them; none during the pause after failed groups.

        Where the pools of the newest header decide what is drawn, nothing is drawn while the next one is committed.
        Raises InvalidStateError if no task is left to draw and nothing that is open can fill the next batch
        (`require_groups`).
        """
        # The header under way may move tasks, and an ordinal drawn now must not depend on whether it does.
        if self.committing is not None and self.settings.buffer.changes_draws:
            return
        plays = self.book.plays
        async with self.player.round(plays.values()) as placing:
            while (served := self.policies.served_version()) is not None and not placing.refused:
                step, ahead = self.ahead
                if self.failures.not_before > time.monotonic():
                    # Looked at for each group: groups may fail, and pause new ones, while others are placed.
                    return
                # Read anew for every group: others finish, and versions are served, while it is waited for.
                if ahead >= self.rule.num_allowed(step=step, served_version=served):
                    return
                # The step that the group will probably be cut into decides its temperature and the oldest version it
                # may start with.
                planned = self.rule.planned_step(step=step, num_ahead=ahead)
                ordinal = self.book.next_ordinal()
                if self.is_exhausted(ordinal):
                    self.require_groups()
                    return
                await self.draw([ordinal])
                # While a user's function drew it, a rollout of a predecessor may have opened its play.
                if ordinal != self.book.next_ordinal():
                    continue
                group = plays[ordinal] = self.make_play(ordinal, planned)
                # If nobody takes it, it stays open, and `place_open` tries again.
                await placing.place(group)

    def require_groups(self) -> None:
        """Raise InvalidStateError if no group is being played or committed, and the finished ones make no batch.

        It is called when no task is left to draw.
        """
        if (
            self.committing is None
            and not self.book.open
            and num_rollouts(self.book.whole) < self.rule.rollouts_per_step
        ):
            raise InvalidStateError(
                f"no task is left to draw for batch {self.book.step}: every one is easy or hard",
                reason="NO_TASKS_LEFT",
                remedy="the policy may have learned what these tasks teach; else move orchestrator.buffer."
                "easy_threshold or hard_threshold, add tasks, or fork the run with an easy_fraction or hard_fraction",
            )

    async def drain(self) -> None:
        """Wait until the open groups have finished, `DRAIN_S` seconds at most, before a pause.

        Finished rollouts stay in the log. Nothing is dropped here.
        """
        try:
            async with asyncio.timeout(DRAIN_S):
                while any(group.state is PlayState.PLACED for group in self.book.open):
                    self.book.changed.clear()
                    count = len(self.book.open)
                    self.wait.on(f"{count} open groups before the pause", waits_on="env-server", key="drain")
                    await self.tick()
        except TimeoutError:
            return
        finally:
            self.wait.over()

    async def drop_stale(self) -> None:
        """Drop every group whose tokens are too old to be trained on, stop its play, and report environments that
        lose many.
        """
        stale = [group for group in (*self.book.open, *self.book.whole) if not self.is_eligible(group)]
        for group in stale:
            self.durations.note(group.task.env, group.seconds, is_stale=True)
        await self.drop(stale, reason="stale")
        if stale:
            await self.report_stale()

    async def report_stale(self) -> None:
        """Write an event for each environment many of whose groups are dropped as stale.

        Many are a share of `MUCH` of its last groups, and at least as many as a step has. It is repeated whenever the
        number of the environment's stale groups has doubled.
        """
        for env, found in self.durations.stale_shares().items():
            number, reported = self.durations.num_stale[env], self.num_stale_reported.get(env, 0)
            is_much = found.share >= MUCH and found.num_stale >= self.settings.groups_per_step
            if not is_much or number < max(2 * reported, 1):
                continue
            self.num_stale_reported[env] = number
            await self.events.warning(
                "GROUPS_STALE",
                f"environment {env!r}: {found.num_stale} of its last {found.num_groups} groups were dropped as stale "
                f"before batch {self.book.step}, {found.num_slow_stale} of them among the {found.num_slow} slowest "
                f"(half of all take {found.median_s:.1f} s or more): inference, or its tasks, are slower than the "
                "trainer; add replicas, or raise orchestrator.max_off_policy_steps",
            )

    @property
    def is_refilling(self) -> bool:
        """Return whether the config has finished groups replaced before the cut if they teach nothing."""
        buffer = self.settings.buffer
        return self.settings.filter_zero_advantages == "refill" or buffer.online_difficulty_filtering

    async def verdict(self, group: Play) -> str:
        """Return why a finished group is to be replaced by one of another task; empty if it is kept.

        The reasons are "easy", "hard" and "zero_advantage". InternalError if the advantages take too long.
        """
        if self.settings.buffer.online_difficulty_filtering and (found := self.ranges.extreme(group.rollouts())):
            return found
        if self.settings.filter_zero_advantages != "refill":
            return ""
        work = partial(teaches, group, self.algorithms[group.task.env], seq_len=self.settings.seq_len)
        is_taught = await self._computed(work, f"the advantages of ordinal {group.ordinal}")
        return "" if is_taught else "zero_advantage"

    async def drop_equal(self) -> None:
        """Drop every finished group that teaches nothing, if the config has such groups replaced.

        Admission draws another task instead. What a group is worth follows from its rollouts alone, so a successor
        drops and counts the same groups. Raises InternalError after too many of them in a row.
        """
        if not self.is_refilling:
            return
        self.teaching &= self.book.plays.keys()
        for group in [group for group in self.book.whole if group.ordinal not in self.teaching]:
            reason = await self.verdict(group)
            # The group may have been dropped during the await.
            if group.ordinal not in self.book.plays:
                continue
            if not reason:
                self.teaching.add(group.ordinal)
                self.num_equal_in_a_row = self.writer.num_empty = 0
                self.filtered_in_a_row.clear()
                continue
            await self.drop([group], reason=reason)
            self.num_equal_in_a_row += 1
            self.filtered_in_a_row[reason] += 1
            # As many replaced groups as make a batch count like a batch without an advantage.
            if self.num_equal_in_a_row % self.settings.groups_per_step == 0:
                rollouts, replaced = group.rollouts(), self.filtered_in_a_row
                found = count_found(rollouts, self.settings.filters)
                await self.writer.count_empty(filtered=found, num_rollouts=len(rollouts), replaced=replaced)

    async def drop(self, groups: Sequence[Play], *, reason: str) -> None:
        """Resolve groups as dropped for `reason`, and ask env-servers to stop those that are still being played."""
        # Looked up first: resolving closes them.
        playing = [group for group in groups if group.is_open]
        self.book.drop(groups, reason=reason)
        await self.player.stop(playing)

    def is_eligible(self, group: Play) -> bool:
        """Return whether a group may still be trained at the step that is cut next.

        A group without known versions may.
        """
        oldest = group.min_policy_version
        return oldest is None or self.rule.is_eligible(step=self.book.step, min_policy_version=oldest)

    def take(self) -> list[Play]:
        """Return the groups of the next batch; empty if there are not enough, or if the batch has to wait.

        A batch waits for a newer policy to be served, and for slow groups that would grow too old (`awaited`).
        """
        served = self.policies.served_version()
        if served is None or not self.rule.may_cut(step=self.book.step, served_version=served):
            return []
        ready = [group for group in self.book.whole if self.is_eligible(group)]
        # A group may have become whole since `drop_equal` looked at them all.
        if self.is_refilling:
            ready = [group for group in ready if group.ordinal in self.teaching]
        batch = self.first_of(ready)
        return [] if not batch or self.awaited(batch) else batch

    def first_of(self, ready: Sequence[Play]) -> list[Play]:
        """Return as many groups of `ready` as make a batch, those first that grow too old first.

        Empty if they make none.

        Groups that grow too old at the same step are taken in their order in `ready`.
        """
        batch: list[Play] = []
        for group in sorted(ready, key=self.last_step):
            batch.append(group)
            if num_rollouts(batch) >= self.rule.rollouts_per_step:
                return batch
        return []

    def last_step(self, group: Play) -> float:
        """Return the last step that may train on a group; infinite while no version of the group's tokens is known."""
        oldest = group.oldest_version
        return math.inf if oldest is None else oldest + self.rule.max_off_policy_steps

    def awaited(self, batch: Sequence[Play]) -> list[Play]:
        """Return the open groups, no slower than most, that would become too old if `batch` were cut now.

        The cut waits for them: else batches would be made of quick tasks alone. By step d no more than (d -
        step) * B rollouts can be trained after this cut. Empty at async level 0, where a step's surplus is
        dropped, and where more groups are played than are needed, so that the slowest are dropped.
        """
        if self.rule.async_level == 0 or self.rule.oversampling_factor > 1:
            return []
        slow = [each for each in self.book.open if each.state is PlayState.PLACED and self.is_in_time(each)]
        taken = {group.ordinal for group in batch}
        left = sorted((each for each in (*self.book.whole, *slow) if each.ordinal not in taken), key=self.last_step)
        sizes = itertools.accumulate(group.group_size for group in left)
        # Earliest deadline first: if the rollouts up to this group do not fit into the batches before its last step,
        # one of them would be dropped as stale, so the open ones among them are worth waiting for.
        for count, (group, size) in enumerate(zip(left, sizes, strict=True), start=1):
            if size > (self.last_step(group) - self.book.step) * self.rule.rollouts_per_step:
                return [each for each in left[:count] if each.is_open]
        return []

    def is_in_time(self, group: Play) -> bool:
        """Return whether an open group has begun and has taken no longer than most groups of its environment."""
        return group.seconds is not None and group.seconds <= self.durations.patience_s(group.task.env)

    async def commit(self, groups: list[Play]) -> None:
        """Make the next batch of `groups` and commit it; at async level 0 drop all other groups.

        A batch without any advantage is not committed, and its step is cut again. After the commit, metrics are
        recorded and warnings written.
        """
        work = partial(
            cut,
            groups,
            self.algorithms,
            step=self.book.step,
            filter_zero_advantages=self.settings.filter_zero_advantages,
            seq_len=self.settings.seq_len,
            filters=self.settings.filters,
            baselines=self.writer.baselines,
        )
        batch = await self._computed(work, f"the advantages of batch {self.book.step}")
        # At async level 0 every batch is on-policy: what is left over was sampled by a policy that this batch replaces.
        # Where there are no samples nothing is trained, and the other groups are still for this step.
        if self.rule.async_level == 0 and batch.samples:
            surplus = [group for group in (*self.book.open, *self.book.whole) if group not in groups]
            await self.drop(surplus, reason="surplus")
        for group in groups:
            self.durations.note(group.task.env, group.seconds, is_stale=False)

        found: dict[str, float] = {}

        def metrics(stale: Mapping[str, int]) -> Mapping[str, float]:
            """Return the batch's metrics by name, and keep them.

            `stale` are the groups dropped as stale by environment.
            """
            shares = self.durations.stale_shares()
            found.update(batch_metrics(groups, seq_len=self.settings.seq_len, stale=stale, shares=shares))
            return found

        await self.writer.commit(batch, metrics=metrics)
        # Otherwise no group had an advantage, and nothing is trained.
        if self.book.step > batch.step:
            self.events.meters.trained(groups, step=batch.step, metrics=found)
            await self.warnings.look(groups, step=batch.step)

    async def _computed(self, work: Callable[[], T], what: str) -> T:
        """Return what `work` returns, a computation in a thread that may call a function of the user's.

        `what` names it. Raises InternalError after `advantage_timeout_s`: the thread cannot be stopped, and what it
        still returns is not used.
        """
        limit_s = self.settings.advantage_timeout_s
        with waiting(what, waits_on="orchestrator", deadline_s=min(SLOW_S, limit_s)):
            try:
                async with asyncio.timeout(limit_s):
                    # Not in the shared pool: a function that never returns would keep one of its threads for ever.
                    return await in_own_thread(work)
            except TimeoutError as error:
                raise InternalError(
                    f"{what} were not computed within {limit_s:g} s",
                    reason="ADVANTAGES_SLOW",
                    remedy="see what the function of `orchestrator.algo` waits for; if it computes for so long, raise "
                    "`orchestrator.advantage_timeout_s`, and go on with `millrace run resume`",
                ) from error

    async def wait_for_change(self) -> None:
        """Register what the next batch waits for, and sleep until something changes (`tick`)."""
        step, have, need = self.book.step, num_rollouts(self.book.whole), self.rule.rollouts_per_step
        if self.committing is not None:
            self.wait.over()  # the commit shows its own waits
        elif self.policies.served_version() is None:
            self.wait.on(
                "a replica that serves this run's policy", waits_on="inference", key="replica", deadline_s=SLOW_S
            )
        elif have >= need and (slow := self.awaited(self.first_of(self.book.whole))):
            counts = Counter(group.task.env for group in slow)
            reason = f"slow groups that batch {step} would leave too old: {by_status(counts)}"
            self.wait.on(reason, waits_on="env-server", key=f"slow {step}", deadline_s=self.timeout_s)
        elif have < need and self.book.open:
            reason = f"{self.missing(need - have, of=need)} for batch {step}"
            if outage := self.failures.outage:
                reason = f"{reason}; {outage}"
            # Where nothing is played and the run's own rollouts leave no room for more, only a larger spool helps.
            full = None if any(play.num_playing for play in self.book.open) else self.full_spool()
            self.wait.on(reason, waits_on="env-server", key=f"groups {step}", deadline_s=self.timeout_s, refusal=full)
        else:
            # All groups are there, so only a version can be missing: the cut may be `async_level` + 1 ahead of the
            # engines.
            version = step - self.rule.async_level
            up_to = self.policies.up_to(version)
            held = self.policies.held_version
            until = "" if held is None or held >= version else f", once the evaluation of policy {held} is over"
            reason = f"policy {version} to be served{until}"
            self.wait.on(reason, waits_on=up_to, key=f"policy {version}", deadline_s=SLOW_S)
        await self.tick()

    def missing(self, count: int, *, of: int) -> str:
        """Return in words how much of a batch is missing, such as "3 of 8 groups"; `count` and `of` are rollouts.

        It is in rollouts where groups are of several sizes.
        """
        sizes = set(self.settings.group_sizes.values())
        if len(sizes) > 1:
            return f"{count} of {of} rollouts"
        size = max(sizes)
        return f"{count // size} of {of // size} groups"

    async def tick(self) -> None:
        """Sleep until something changes, `TICK_S` has passed, or a pause after failed groups or plays is over."""
        await asyncio.sleep(REST_S * len(self.book.plays))
        now = time.monotonic()
        due = [self.failures.not_before, *(play.not_before for play in self.book.open)]
        pause_s = min((at - now for at in due if at > now), default=TICK_S)
        try:
            async with asyncio.timeout(min(pause_s, TICK_S)):
                await self.book.changed.wait()
        except TimeoutError:
            return
