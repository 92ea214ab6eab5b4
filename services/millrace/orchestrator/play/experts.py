"""Recorded experts of tokens that no token of the policy can have: refused where rollouts come in.

They are checked against what the replicas say of themselves, so that a batch has only experts which the engine's model
has.
"""

from collections.abc import Callable
from dataclasses import replace

from millrace.rollouts.routed_experts import RoutedForm
from millrace.rollouts.types import Purpose, Rollout

Declared = Callable[[], RoutedForm | None]
"""Returns what the experts look like that replicas record; None where none says so."""


class ExpertsCheck:
    """Takes misfitting experts out of rollouts, which stay in play without them, and counts such rollouts."""

    def __init__(self, declared: Declared) -> None:
        """Make a check against what `declared` returns when a rollout comes in; without that nothing is refused."""
        self._declared = declared
        self._num_refused = 0
        self._problem = ""
        self._is_new = False

    def checked(self, rollout: Rollout) -> Rollout:
        """Return the rollout, without the experts of its samples if those of one misfit.

        Rollouts of evaluations are returned as they are.
        """
        if rollout.purpose is not Purpose.TRAIN or all(each.routed_experts is None for each in rollout.samples):
            return rollout
        if (form := self._declared()) is None:
            return rollout
        for sample in rollout.samples:
            if sample.routed_experts is not None and (problem := form.problem_of(sample.routed_experts)):
                self._num_refused, self._is_new = self._num_refused + 1, True
                self._problem = (
                    f"ordinal {rollout.ordinal}, member {rollout.member}, environment {rollout.env!r} has {problem}, "
                    f"and the engine has {form.top_k} of {form.num_experts} experts in each of {form.num_layers} layers"
                )
                return replace(rollout, samples=tuple(replace(each, routed_experts=None) for each in rollout.samples))
        return rollout

    def report(self) -> str:
        """Return the text of a warning about the rollouts whose experts were refused; "" without any since the last
        call.
        """
        if not self._is_new:
            return ""
        self._is_new = False
        return (
            f"the recorded experts of {self._num_refused} rollouts so far misfit and were left out, so that the "
            f"trainer's routers choose for them; the last: {self._problem}; all replicas of a run serve one model, and "
            "env-servers keep what these answer"
        )
