"""When a group may start and its rollouts may be trained on, and which replica a play goes to.

A rollout stays on its replica for all of its turns, and so does a group, because the request names one base URL: their
common prefix is computed once. A group that is played again prefers the replica of the attempt before for the same
reason, unless that one lost it. Busy is counted in rollouts that were sent there and have not come back, relative to
what the replica generates at once; all kinds of work of the run count together.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        """Return the replicas that serve and take work."""
        ...

    def known(self) -> set[str]:
        """Return the worker ids of all replicas, ready or not."""
        ...

    def replica_at(self, http_url: str) -> str:
        """Return the worker id of the replica with that base URL; empty if there is none."""
        ...

    def suspect(self, worker_id: str) -> None:
        """Note that a rollout lost its engine at that replica."""
        ...

    def publish(self, entry: policy_pb2.PolicyEntry) -> None:
        """Note that a version was published."""
        ...

    def served_version(self) -> int | None:
        """Return the newest version that a ready replica serves."""
        ...

    def oldest_in_use(self) -> int | None:
        """Return the oldest version that a replica serves or shall serve; None if there is none."""
        ...

    def up_to(self, version: int) -> str:
        """Return the kind of component that must act before a version is served."""
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
        """Take the rollouts that `load` counts into account from now on."""
        self._loads.append(load)

    def pick(
        self, replicas: Iterable[ReadyReplica], *, min_version: int, home: str = "", is_pinned: bool = False
    ) -> ReadyReplica | None:
        """Return the replica for a play, the least busy at `min_version` or newer; None if there is none.

        `home` is the worker id of the replica that has the prefix already, which is preferred unless it is full
        and another one is not. One that is taking a new version gets something only if all do that. Pinned
        plays go to held replicas alone; others go there only if no other fits, because what is held grows old.
        """
        fit = [each for each in replicas if each.version >= min_version and (each.is_held or not is_pinned)]
        if not is_pinned:
            fit = [each for each in fit if not each.is_held] or fit
        load = Counter[str]()
        for part in self._loads:
            load.update(part())

        def share(replica: ReadyReplica) -> float:
            return load[replica.worker_id] / (replica.max_num_seqs or DEFAULT_SEQS)

        best = min(fit, key=lambda each: (each.is_applying, share(each), each.worker_id), default=None)
        stay = next((each for each in fit if each.worker_id == home and not each.is_applying), None)
        return stay if stay is not None and (share(stay) < 1 or stay is best) else best


# When a group may start, when its rollouts may be trained on: the two predicates that bound staleness.
#
# Let `c` be the next step to cut, `v` the newest version that a ready engine serves, B the rollouts of a step, f the
# oversampling factor, L the async level. A group is admitted while, counted in rollouts,
#
# open + finished_unbatched < ceil((v + L + 1 - c) * B * f) and c < max_steps.
#
# A step is cut of whole groups, of the fewest that have B rollouts: where all groups are of one size, which divides
# B, of just as many. Where they differ, a step has less than one group more, and so has what is ahead.
#
# Why this bounds the work ahead: committed but untrained batches are counted through `c`, because committing a batch
# raises `c` by one and so lowers the right side by B * f. Since v <= c always (version v exists only after batches
# 0..v-1), the right side never exceeds (L + 1) * B * f: there is never more than L + 1 steps' worth of groups that
# are open or finished but not batched. At L = 0, after batch n-1 is cut (c = n), the right side is (v + 1 - n) * G *
# f, which is positive only once v = n: nothing for step n starts before version n is served.
#
# With f > 1 a step leaves surplus groups, and cutting these at once would run ahead of the trainer: a cut lowers the
# left side by B but the right side by B * f. So a step is cut only while `c <= v + L`; without surplus that always
# holds, since groups for step c are admitted only then. Surplus groups wait, and are dropped once they are too old.


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRule:
    """The admission and eligibility predicates of one run, in the units of its config."""

    rollouts_per_step: int
    async_level: int
    max_off_policy_steps: int
    oversampling_factor: float
    max_steps: int | None

    def num_allowed(self, *, step: int, served_version: int) -> int:
        """Return the number of rollouts that may be open or finished but unbatched when `step` is the next to
        cut; a group may go beyond.
        """
        steps_ahead = served_version + self.async_level + 1 - step
        if self.max_steps is not None:
            # Work for steps that will never be cut would only be thrown away at the end.
            steps_ahead = min(steps_ahead, self.max_steps - step)
        return max(0, math.ceil(steps_ahead * self.rollouts_per_step * self.oversampling_factor))

    def may_cut(self, *, step: int, served_version: int) -> bool:
        """Return whether `step` may be cut: batches are at most L + 1 steps ahead of what engines serve."""
        return step <= served_version + self.async_level

    def planned_step(self, *, step: int, num_ahead: int) -> int:
        """Return the step that a group will be cut into if `num_ahead` rollouts come before it and none is dropped."""
        return step + int(num_ahead // (self.rollouts_per_step * self.oversampling_factor))

    def min_version(self, *, planned_step: int) -> int:
        """Return the oldest version that a replica may serve to get a group planned for `planned_step`."""
        return max(0, planned_step - self.async_level)

    def is_eligible(self, *, step: int, min_policy_version: int) -> bool:
        """Return whether rollouts whose oldest token is of `min_policy_version` may be trained at `step`."""
        return min_policy_version >= step - self.max_off_policy_steps
