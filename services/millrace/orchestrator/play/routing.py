"""When a group may start and its rollouts may be trained on, and which replica a play goes to.

A rollout stays on its replica for all of its turns, and so does a group, because the request names one base URL: their
common prefix is computed once. A group that is played again prefers the replica of the attempt before for the same
reason, unless that one lost it. Busy is counted in rollouts that were sent there and have not come back, relative to
what the replica generates at once; all kinds of work of the run count together.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace.internal.v1 import policy_pb2

DEFAULT_SEQS = 256
"""Sequences at once of a replica that does not say how many."""

Load = Callable[[], Mapping[str, int]]
"""Rollouts that are being played, by the replica's worker id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyReplica:
    """A replica that serves a version of this run's policy."""

    worker_id: str
    http_url: str
    model: str
    version: int
    max_num_seqs: int = 0
    """Sequences that it generates at once; 0 if it does not say."""
    is_applying: bool = False
    """It takes a new version and generates nothing meanwhile."""
    is_held: bool = False
    """It keeps its version for an evaluation (`Policies.hold`)."""


class Policies(Protocol):
    """The policies of a run, and the replicas that serve them."""

    @property
    def desired(self) -> policy_pb2.PolicyEntry | None:
        """Return the policy that the replicas shall serve; None if it never changes."""
        ...

    def ready(self) -> Sequence[ReadyReplica]:
        """Return the replicas that serve a version of the policy and take work."""
        ...

    def known(self) -> set[str]:
        """Return the worker ids of all replicas, ready or not."""
        ...

    def replica_at(self, http_url: str) -> str:
        """Return the worker id of the replica with that base URL; empty if there is none."""
        ...

    def suspect(self, worker_id: str) -> None:
        """Note that a rollout lost its engine at the replica with this worker id."""
        ...

    def publish(self, entry: policy_pb2.PolicyEntry) -> None:
        """Note that the version of `entry` was published."""
        ...

    def served_version(self) -> int | None:
        """Return the newest version that a ready replica serves; None if there is none."""
        ...

    def oldest_in_use(self) -> int | None:
        """Return the oldest version that a replica serves or shall serve; None if there is none."""
        ...

    def up_to(self, version: int) -> str:
        """Return the kind of component, such as the trainer, on which it depends that `version` is served."""
        ...

    def hold(self, version: int) -> None:
        """Have one replica stop at a version that is to be evaluated, and keep it until `release`."""
        ...

    def release(self) -> None:
        """Let the replica that was held go on to the newest version."""
        ...

    @property
    def newest_due(self) -> int | None:
        """Return the newest published version that may be evaluated; None before the first."""
        ...

    @property
    def held_version(self) -> int | None:
        """Return the version that a held replica serves; None while none does."""
        ...

    async def run(self) -> None:
        """Keep replicas at the newest version; ends by cancellation."""
        ...


class Router:
    """Chooses replicas by all the work that was sent to them, by training and evaluations alike."""

    def __init__(self) -> None:
        self._loads: list[Load] = []

    def count(self, load: Load) -> None:
        """Count the rollouts that `load` returns, by worker id, as work of the replicas from now on."""
        self._loads.append(load)

    def choices(self, replicas: Sequence[ReadyReplica]) -> "Choices":
        """Return a chooser among `replicas`, with the rollouts that are being played on each of them now."""
        load = Counter[str]()
        for part in self._loads:
            load.update(part())
        return Choices(replicas, load)


class Choices:
    """The replicas among which a round of placements chooses.

    Their load grows as the round places plays.
    """

    def __init__(self, replicas: Sequence[ReadyReplica], load: Counter[str]) -> None:
        """Make a chooser among `replicas`.

        `load` has the rollouts on each by its worker id, and grows as plays are placed.
        """
        self._replicas = {each.worker_id: each for each in replicas}
        self._load = load
        self._ranked = sorted(map(self._rank, replicas))
        """A heap, whose ranks may be too low: work is only added."""

    def pick(self, *, min_version: int, home: str = "", is_pinned: bool = False) -> ReadyReplica | None:
        """Return the replica for a play, the least busy that serves `min_version` or newer; None if there is none.

        `home` is the worker id of the replica that has the prefix already ("": none); it is preferred unless it is
        full. A replica that is taking a new version gets something only if all do that. With `is_pinned` only replicas
        that are held at a version are chosen; other plays go to held ones only if no other fits, because what is held
        grows old.
        """
        best = self._best(min_version=min_version, is_pinned=is_pinned)
        stay = self._replicas.get(home)
        if best is None or stay is None or stay.is_applying or stay.version < min_version:
            return best
        # A held replica is left for one that is free, because what is held grows old; pinned plays need a held one.
        is_kept_free = stay.is_held > best.is_held or (is_pinned and not stay.is_held)
        return stay if not is_kept_free and self._share(stay) < 1 else best

    def add(self, worker_id: str, num_rollouts: int) -> None:
        """Count `num_rollouts` more as work of a replica."""
        self._load[worker_id] += num_rollouts

    def _best(self, *, min_version: int, is_pinned: bool) -> ReadyReplica | None:
        """Return the least busy replica at `min_version` or newer; None if there is none.

        `is_pinned` is that of `pick`.
        """
        # A rank that is out of date is too low, so only the first of the heap has to be computed anew.
        while self._ranked and self._ranked[0] != (rank := self._rank(self._replicas[self._ranked[0][-1]])):
            heapq.heapreplace(self._ranked, rank)
        first = self._replicas[self._ranked[0][-1]] if self._ranked else None
        if first is None or (first.version >= min_version and not is_pinned):
            return first
        # The heap has the least busy one first. It cannot tell which fits, so the rare other cases look at all.
        fit = [each for each in self._replicas.values() if each.version >= min_version]
        return min((each for each in fit if each.is_held or not is_pinned), key=self._rank, default=None)

    def _rank(self, replica: ReadyReplica) -> tuple[bool, bool, float, str]:
        """Return a replica's sort key: free ones before held ones, then those that generate, then the least busy."""
        return replica.is_held, replica.is_applying, self._share(replica), replica.worker_id

    def _share(self, replica: ReadyReplica) -> float:
        """Return how busy a replica is: rollouts on it, divided by the sequences that it generates at once."""
        return self._load[replica.worker_id] / (replica.max_num_seqs or DEFAULT_SEQS)


# The admission formula. A group starts while
#
#     open + finished < ceil((v + L + 1 - c) · B · f)
#
# with c the next step to cut, v the newest version that an engine serves, L the async level, B the rollouts of a step,
# f the oversampling factor, and on the left the rollouts that are open, or finished and in no batch.
#
# * Version v is made of the batches 0 to v - 1, so v ≤ c, and the right side is at most (L + 1) · B · f. There is never
#   more work ahead than that of L + 1 steps, and the rest of the group that was admitted last.
# * Batches that are committed and not trained yet are counted by c: a commit takes B · f off the right side, and only
#   the next version gives it back. A trainer that stops therefore stops admission.
# * L = 0: after batch n - 1 is cut (c = n) the right side is (v + 1 - n) · B · f, which is positive once v = n. No
#   rollout of step n starts before version n is served.
# * A group that is planned for step p starts with version p - L or a newer one (`min_version`). Where groups are cut in
#   the order in which they started, no token is older than L versions at f = 1, and than 2 L + 1 at a larger f
#   (tests/unit/orchestrator/test_admission.py simulates it). `max_off_policy_steps` bounds all others.


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRule:
    """The admission and eligibility predicates of one run, in the units of its config."""

    rollouts_per_step: int
    async_level: int
    max_off_policy_steps: int
    oversampling_factor: float
    max_steps: int | None

    def num_allowed(self, *, step: int, served_version: int) -> int:
        """Return how many rollouts may be open or finished but not in a batch; a group may go beyond.

        `step` is the next to be cut, `served_version` the newest version that engines serve. 0 if none may.
        """
        steps_ahead = served_version + self.async_level + 1 - step
        if self.max_steps is not None:
            # Work for steps that will never be cut would only be thrown away at the end.
            steps_ahead = min(steps_ahead, self.max_steps - step)
        return max(0, math.ceil(steps_ahead * self.rollouts_per_step * self.oversampling_factor))

    def may_cut(self, *, step: int, served_version: int) -> bool:
        """Return whether the batch of `step` may be cut: `async_level` steps at most ahead of the version that
        engines serve.
        """
        return step <= served_version + self.async_level

    def planned_step(self, *, step: int, num_ahead: int) -> int:
        """Return the step that a new group will be cut into if none is dropped.

        `step` is the next to be cut, `num_ahead` the number of rollouts that are before the group.
        """
        return step + int(num_ahead // (self.rollouts_per_step * self.oversampling_factor))

    def min_version(self, *, planned_step: int) -> int:
        """Return the oldest policy version that a replica may serve to get a group planned for `planned_step`."""
        return max(0, planned_step - self.async_level)

    def is_eligible(self, *, step: int, min_policy_version: int) -> bool:
        """Return whether rollouts whose oldest token is of `min_policy_version` are fresh enough to be trained at
        `step`.
        """
        return min_policy_version >= step - self.max_off_policy_steps
