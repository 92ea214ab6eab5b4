"""What one step measured, token by token, over all micro-batches and ranks, under prime-rl's metric names."""

import math
from collections.abc import Iterator, Sequence

import torch

from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import MicroBatch
from millrace.trainer.learning.expert_load import ExpertLoad, load_metrics
from millrace.trainer.losses import LossInputs, log_ratio_to_reference
from millrace.trainer.losses.base import TokenLosses, k3, outside_support

ON_POLICY_KL = "on_policy_mismatch_kl"
_MEANS = (
    "loss",
    "mismatch_kl",
    ON_POLICY_KL,
    "masked_mismatch_kl",
    "unmasked_mismatch_kl",
    "is_masked",
    "is_masked_low",
    "is_masked_high",
    "masked_advantage_positive",
    "masked_advantage_negative",
    "is_outside_support",
    "entropy",
    "nll",
    "ratio",
    "ratio_squared",
    "reference_kl",
    "advantage",
    "advantage_squared",
)
_MAX_LOG_RATIO = 20.0
_BY_ENV = (
    "mismatch_kl",
    ON_POLICY_KL,
    "entropy",
    "is_masked",
    "is_masked_low",
    "is_masked_high",
    "reference_kl",
    "ratio",
    "ratio_squared",
    "advantage",
    "advantage_squared",
)
_ALL = ("mismatch_kl", "entropy", "is_masked", "reference_kl")
"""Also under the name `<name>/all/mean`, which prime-rl's dashboards read."""


class StepMetrics:
    """Sums, counts and maxima; the keys are fixed by the environments' names, so the ranks' vectors line up."""

    def __init__(self, envs: Sequence[str], *, version: int | None = None) -> None:
        """`version` is the one whose weights compute, until an optimizer step has changed them."""
        self._envs, self._version = tuple(envs), version
        names = [*_MEANS, *(f"{name}/{env}" for name in _BY_ENV for env in self._envs)]
        self._sums = dict.fromkeys(names, 0.0)
        self._counts = dict.fromkeys(names, 0.0)
        self._maxima = {"loss": -float("inf"), "mismatch_kl": 0.0}
        for scope in self._scopes:
            self._maxima |= {f"ratio{scope}": 0.0, f"-ratio{scope}": -float("inf")}
        self._loss_squares = 0.0
        self._total_loss = 0.0
        self._num_steps = 1
        self._expert_load: torch.Tensor | None = None

    @torch.no_grad()
    def add(
        self,
        micro_batch: MicroBatch,
        *,
        losses: TokenLosses,
        loss: torch.Tensor,
        trainer_logprobs_BT: torch.Tensor,
        entropy_BT: torch.Tensor,
    ) -> bool:
        """Add a micro-batch; `loss` is its share of the batch's loss. Whether it is finite, and so is the entropy."""
        is_outside = micro_batch.loss_mask_BT & outside_support(trainer_logprobs_BT)
        sampled = micro_batch.loss_mask_BT & ~is_outside
        members = losses.rl_members
        is_masked = losses.is_masked_low | losses.is_masked_high
        own_loss = float(loss)
        self._total_loss += own_loss
        self._add("loss", losses.rl + losses.ce, members | losses.ce_members)
        self._add_by_env("mismatch_kl", losses.mismatch_kl, sampled, micro_batch)
        is_own = torch.tensor([each == (self._version,) * 2 for each in micro_batch.versions_B], device=sampled.device)
        self._add_by_env(ON_POLICY_KL, losses.mismatch_kl, sampled & is_own[:, None], micro_batch)
        self._add("masked_mismatch_kl", losses.mismatch_kl, is_masked)
        self._add("unmasked_mismatch_kl", losses.mismatch_kl, members & ~is_masked)
        self._add_by_env("is_masked", is_masked, members, micro_batch)
        self._add_by_env("is_masked_low", losses.is_masked_low, members, micro_batch)
        self._add_by_env("is_masked_high", losses.is_masked_high, members, micro_batch)
        self._add("masked_advantage_positive", losses.is_masked_high, is_masked)
        self._add("masked_advantage_negative", losses.is_masked_low & (losses.advantages != 0), is_masked)
        self._add_by_env("advantage", losses.advantages, members, micro_batch)
        self._add_by_env("advantage_squared", losses.advantages.double() ** 2, members, micro_batch)
        self._add_ratio(trainer_logprobs_BT - micro_batch.inference_logprobs_BT, members, micro_batch)
        if micro_batch.sampled.cuts_any:
            self._add("is_outside_support", is_outside, micro_batch.loss_mask_BT)
        own_entropy = self._add_by_env("entropy", entropy_BT, sampled, micro_batch)
        self._add("nll", -trainer_logprobs_BT, losses.ce_members)
        return math.isfinite(own_loss) and math.isfinite(own_entropy)

    @torch.no_grad()
    def add_reference(self, micro_batch: MicroBatch, inputs: LossInputs) -> None:
        """Add how far the policy is from its start model, where the run compares with it: k3 of the log-ratio."""
        if (log_ratio_BT := log_ratio_to_reference(inputs)) is not None:
            self._add_by_env("reference_kl", k3(-log_ratio_BT), inputs.rl_members, micro_batch)

    def add_expert_load(self, load: ExpertLoad | None) -> None:
        """Add the tokens that each expert had, of a model with experts."""
        self._expert_load = None if load is None else load.take()

    def reduce(self, gang: Gang) -> "StepMetrics":
        """What all ranks measured together. Collective in a gang."""
        whole, names = StepMetrics(self._envs), list(self._sums)
        reduced = gang.sum_of_data([*self._sums.values(), *self._counts.values(), self._loss_squares, self._total_loss])
        whole._sums = dict(zip(names, reduced[: len(names)], strict=True))
        whole._counts = dict(zip(names, reduced[len(names) : 2 * len(names)], strict=True))
        whole._loss_squares, whole._total_loss = reduced[-2:]
        whole._maxima = dict(zip(self._maxima, gang.max(list(self._maxima.values())), strict=True))
        if (load := self._expert_load) is not None:
            whole._expert_load = torch.tensor(gang.sum(load.flatten().tolist())).view(load.shape)
        return whole

    @classmethod
    def merged(cls, steps: Sequence["StepMetrics"]) -> "StepMetrics":
        """What several optimizer steps measured, as one; its loss is their mean."""
        first, *others = steps
        whole = cls(first._envs)
        whole._num_steps = len(steps)
        whole._sums = {name: sum((s._sums[name] for s in others), value) for name, value in first._sums.items()}
        whole._counts = {name: sum((s._counts[name] for s in others), value) for name, value in first._counts.items()}
        whole._maxima = {name: max(s._maxima[name] for s in steps) for name in first._maxima}
        whole._loss_squares = sum(s._loss_squares for s in steps)
        whole._total_loss = sum(s._total_loss for s in steps)
        loads = [s._expert_load for s in steps if s._expert_load is not None]
        whole._expert_load = torch.stack(loads).sum(0) if loads else None
        return whole

    @property
    def is_finite(self) -> bool:
        """Whether the loss is a finite number, and so are the entropies."""
        return math.isfinite(self._total_loss) and math.isfinite(self._sums["entropy"])

    def values(self) -> dict[str, float]:
        """The metrics by name; a mean over no tokens is left out."""
        sums, counts, maxima = self._sums, self._counts, self._maxima
        means = {name: sums[name] / counts[name] for name in sums if counts[name]}
        metrics = {f"{name}/mean": value for name, value in means.items()}
        if counts["loss"]:
            variance = self._loss_squares / counts["loss"] - means["loss"] ** 2
            metrics["loss/std"] = max(variance, 0.0) ** 0.5
            metrics["loss/max"] = maxima["loss"]
        metrics["loss/mean"] = self._total_loss / self._num_steps
        for name in _ALL:
            if f"{name}/mean" in metrics:
                metrics[f"{name}/all/mean"] = metrics[f"{name}/mean"]
        if counts["mismatch_kl"]:
            metrics["mismatch_kl/max"] = maxima["mismatch_kl"]
        for scope in self._scopes:
            if counts[f"ratio{scope}"]:
                metrics[f"ratio{scope}/max"] = maxima[f"ratio{scope}"]
                metrics[f"ratio{scope}/min"] = -maxima[f"-ratio{scope}"]
                squared = metrics.pop(f"ratio_squared{scope}/mean")
                metrics[f"ess{scope}/mean"] = means[f"ratio{scope}"] ** 2 / squared if squared else 0.0
            if counts[f"advantage{scope}"]:
                variance = metrics.pop(f"advantage_squared{scope}/mean") - means[f"advantage{scope}"] ** 2
                metrics[f"advantage{scope}/std"] = max(variance, 0.0) ** 0.5
        if means.get("entropy"):
            metrics["kl_ent_ratio/mean"] = means["mismatch_kl"] / means["entropy"]
        if self._expert_load is not None:
            metrics |= load_metrics(self._expert_load)
        return metrics

    @property
    def _scopes(self) -> tuple[str, ...]:
        """What follows a metric's name: nothing for the whole batch, and each environment."""
        return ("", *(f"/{env}" for env in self._envs))

    def _add_ratio(self, log_ratio_BT: torch.Tensor, members: torch.Tensor, micro_batch: MicroBatch) -> None:
        """Add the ratio of both policies at the tokens that are trained on; bounded, so that one token is not all."""
        ratio_BT = log_ratio_BT.double().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
        self._add_by_env("ratio", ratio_BT, members, micro_batch)
        self._add_by_env("ratio_squared", ratio_BT**2, members, micro_batch)
        for scope, own in self._members_by_scope(members, micro_batch):
            if (selected := ratio_BT[own]).numel():
                self._maxima[f"-ratio{scope}"] = max(self._maxima[f"-ratio{scope}"], -float(selected.min()))

    def _members_by_scope(self, members: torch.Tensor, micro_batch: MicroBatch) -> Iterator[tuple[str, torch.Tensor]]:
        """The tokens of each environment of the micro-batch, and last all of them."""
        for env in self._envs:
            if env in micro_batch.env_B:
                rows = torch.tensor([each == env for each in micro_batch.env_B], device=members.device)[:, None]
                yield f"/{env}", members & rows
        yield "", members

    def _add_by_env(self, name: str, values: torch.Tensor, members: torch.Tensor, micro_batch: MicroBatch) -> float:
        """Add what is measured at some tokens, and once more for each environment; its sum."""
        own = 0.0
        for scope, selected in self._members_by_scope(members, micro_batch):
            own = self._add(f"{name}{scope}", values, selected)
        return own

    def _add(self, name: str, values: torch.Tensor, members: torch.Tensor) -> float:
        """Add what is measured at some tokens; its sum."""
        selected = values[members].double()
        if not selected.numel():
            return 0.0
        own = float(selected.sum())
        self._sums[name] += own
        self._counts[name] += selected.numel()
        if name in self._maxima:
            self._maxima[name] = max(self._maxima[name], float(selected.max()))
        if name == "loss":
            self._loss_squares += float((selected**2).sum())
        return own
