"""When a group may start, when its rollouts may be trained on: the two predicates that bound staleness.

Let `c` be the next step to cut, `v` the newest version that a ready engine serves, B the rollouts of a step, f the
oversampling factor, L the async level. A group is admitted while, counted in rollouts,

    open + finished_unbatched < ceil((v + L + 1 - c) * B * f)    and    c < max_steps.

A step is cut of whole groups, of the fewest that have B rollouts: where all groups are of one size, which divides B, of
just as many. Where they differ, a step has less than one group more, and so has what is ahead.

Why this bounds the work ahead: committed but untrained batches are counted through `c`, because committing a batch
raises `c` by one and so lowers the right side by B * f. Since v <= c always (version v exists only after batches
0..v-1), the right side never exceeds (L + 1) * B * f: there is never more than L + 1 steps' worth of groups that are
open or finished but not batched. At L = 0, after batch n-1 is cut (c = n), the right side is (v + 1 - n) * G * f,
which is positive only once v = n: nothing for step n starts before version n is served.

With f > 1 a step leaves surplus groups, and cutting these at once would run ahead of the trainer: a cut lowers the
left side by B but the right side by B * f. So a step is cut only while `c <= v + L`; without surplus that always holds,
since groups for step c are admitted only then. Surplus groups wait, and are dropped once they are too old.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRule:
    """The admission and eligibility predicates of one run, in the units of its config."""

    rollouts_per_step: int
    async_level: int
    max_off_policy_steps: int
    oversampling_factor: float
    max_steps: int | None

    def num_allowed(self, *, step: int, served_version: int) -> int:
        """Rollouts that may be open or finished-unbatched when `step` is the next to cut; a group may go beyond."""
        steps_ahead = served_version + self.async_level + 1 - step
        if self.max_steps is not None:
            # Work for steps that will never be cut would only be thrown away at the end.
            steps_ahead = min(steps_ahead, self.max_steps - step)
        return max(0, math.ceil(steps_ahead * self.rollouts_per_step * self.oversampling_factor))

    def may_cut(self, *, step: int, served_version: int) -> bool:
        """Whether `step` may be cut: never more than L + 1 steps ahead of what engines serve."""
        return step <= served_version + self.async_level

    def planned_step(self, *, step: int, num_ahead: int) -> int:
        """Step that a group will be cut into if `num_ahead` rollouts stand before it and none is dropped."""
        return step + int(num_ahead // (self.rollouts_per_step * self.oversampling_factor))

    def min_version(self, *, planned_step: int) -> int:
        """Oldest version that a replica may serve to get a group planned for `planned_step`."""
        return max(0, planned_step - self.async_level)

    def is_eligible(self, *, step: int, min_policy_version: int) -> bool:
        """Whether rollouts whose oldest token is of `min_policy_version` may be trained at `step`."""
        return min_policy_version >= step - self.max_off_policy_steps
