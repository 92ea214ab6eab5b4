"""The metrics of a step under prime-rl's names, and warnings about numbers that are wrong."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

import torch
from torch import nn

from millrace.internal.v1 import batch_pb2
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import MicroBatch, Minibatch
from millrace.trainer.losses import LossInputs, TokenLosses, k3, log_ratio_to_reference, outside_support
from millrace.trainer.model.expert_parallel import experts_of

ON_POLICY_KL = "on_policy_mismatch_kl"
DATASET_NLL = "dataset_nll"
ONE_PASS = "one_pass_tokens"
REPLAYED = "replayed_tokens"
MISFIT = "misfit_experts"
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
    DATASET_NLL,
    ONE_PASS,
    REPLAYED,
    MISFIT,
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


# How evenly a router spreads tokens over the experts of each layer.
#
# All tokens of a step's forward passes count, padding included. If activations are computed again, a layer counts
# them twice, which changes no share.


class ExpertLoad:
    """Counts the tokens of each expert at this rank, in forward passes with gradients enabled."""

    def __init__(self, layers: list[Any]) -> None:
        """Register a hook at each of `layers`, the modules of experts, that counts the tokens of each expert."""
        self._counts = [torch.zeros(layer.num_experts, dtype=torch.int64) for layer in layers]
        for place, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._counting(place))

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Begin to count the tokens of each expert in a model, and return the counter.

        None if the model has no experts.
        """
        layers = list(experts_of(model))
        return cls(layers) if layers else None

    def take(self) -> torch.Tensor:
        """Return each expert's tokens since the last call, float64 [layers, experts], and begin again at 0."""
        counts = torch.stack([each.to("cpu", torch.float64) for each in self._counts])
        self._counts = [torch.zeros_like(each) for each in self._counts]
        return counts

    def _counting(self, place: int) -> Any:
        """Return a forward hook that adds the tokens of each expert to the counts of layer number `place`."""

        def count(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            # Forwards without gradient, those of the reference for example, train no router.
            if torch.is_grad_enabled():
                # The second argument of transformers' experts has the experts of each token, [T, K].
                index_P = arguments[1].reshape(-1)
                # Not `bincount`, the length of whose result depends on the data: it would end a compiled graph.
                before = self._counts[place].to(index_P.device)
                self._counts[place] = before.scatter_add(0, index_P, torch.ones_like(index_P))

        return count


def load_metrics(counts: torch.Tensor) -> dict[str, float]:
    """Return metrics, by name, of how evenly tokens are spread over experts; `counts` are tokens, [layers, experts].

    `max_vio` is how much more than its fair share the fullest expert of a layer has (0 is even, 1 is twice as much),
    `idle_experts` the share of experts that no token went to.
    """
    excess = counts.amax(1) * counts.shape[1] / counts.sum(1).clamp(min=1) - 1
    return {
        "max_vio/mean": float(excess.mean()),
        "max_vio/max": float(excess.max()),
        "idle_experts/mean": float((counts == 0).double().mean()),
    }


class StepMetrics:
    """Sums, counts and maxima; the keys are fixed by the environments' names, so the ranks' vectors line up."""

    def __init__(self, envs: Sequence[str], *, version: int | None = None) -> None:
        """Begin without values. `envs` are the environments' names, which have metrics of their own.

        `version` is that of the weights: tokens that this version sampled count for `ON_POLICY_KL`. None: the weights
        are no published version, and none does.
        """
        self._envs, self._version = tuple(envs), version
        names = [*_MEANS, *(f"{name}/{env}" for name in _BY_ENV for env in self._envs)]
        self._sums = dict.fromkeys(names, 0.0)
        self._counts = dict.fromkeys(names, 0.0)
        self._maxima = {"loss": -float("inf"), "mismatch_kl": 0.0}
        for scope in self._scopes:
            # A minimum is the maximum of the negative: the ranks exchange one vector of maxima.
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
        """Add a micro-batch's tokens to all metrics; return whether its loss and the sum of its entropies are finite.

        `losses` are per token, and `loss` is the micro-batch's share of the batch's loss.
        """
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
        # DPPO drops tokens with an advantage of 0 on the low side, too.
        self._add("masked_advantage_negative", losses.is_masked_low & (losses.advantages != 0), is_masked)
        self._add_by_env("advantage", losses.advantages, members, micro_batch)
        self._add_by_env("advantage_squared", losses.advantages.double() ** 2, members, micro_batch)
        self._add_ratio(trainer_logprobs_BT - micro_batch.inference_logprobs_BT, members, micro_batch)
        if micro_batch.sampled.cuts_any:
            self._add("is_outside_support", is_outside, micro_batch.loss_mask_BT)
        own_entropy = self._add_by_env("entropy", entropy_BT, sampled, micro_batch)
        self._add("nll", -trainer_logprobs_BT, losses.ce_members)
        is_dataset_B1 = ~micro_batch.loss_mask_BT.any(dim=-1, keepdim=True)  # nothing in the row was sampled
        self._add(DATASET_NLL, -trainer_logprobs_BT, losses.ce_members & is_dataset_B1)
        return math.isfinite(own_loss) and math.isfinite(own_entropy)

    @torch.no_grad()
    def add_reference(self, micro_batch: MicroBatch, inputs: LossInputs) -> None:
        """Add the estimated KL divergence (k3) of the policy to the start model.

        Do nothing if `inputs` have no reference.
        """
        if (log_ratio_BT := log_ratio_to_reference(inputs)) is not None:
            self._add_by_env("reference_kl", k3(-log_ratio_BT), inputs.rl_members, micro_batch)

    def add_expert_load(self, load: ExpertLoad | None) -> None:
        """Take the tokens that `load` has counted as this step's, which empties it; None: the model has no experts."""
        self._expert_load = None if load is None else load.take()

    def add_one_pass(self, num_tokens: int, minibatch: Minibatch) -> None:
        """Count `num_tokens` of the minibatch as those whose gradient came with their log-prob, in one pass."""
        self._sums[ONE_PASS] += num_tokens
        self._counts[ONE_PASS] += sum(len(each.rows.scored_N) for each in minibatch.micro_batches)

    def add_replayed(self, minibatch: Minibatch) -> None:
        """Count the minibatch's tokens, those of them that were sent to the experts which the engine recorded, and
        those whose experts are of another model.
        """
        for each in minibatch.micro_batches:
            self._sums[REPLAYED] += each.num_routed_tokens
            self._counts[REPLAYED] += each.num_tokens
            # Only a share of the tokens that have experts: without any there is no metric.
            self._sums[MISFIT] += each.num_misfit_tokens
            self._counts[MISFIT] += each.num_routed_tokens + each.num_misfit_tokens

    def reduce(self, gang: Gang) -> "StepMetrics":
        """Return the measurements of all ranks as one new object; this one stays as it is. Collective in a gang."""
        whole, names = StepMetrics(self._envs), list(self._sums)
        reduced = gang.sum_of_data([*self._sums.values(), *self._counts.values(), self._loss_squares, self._total_loss])
        whole._sums = dict(zip(names, reduced[: len(names)], strict=True))
        whole._counts = dict(zip(names, reduced[len(names) : 2 * len(names)], strict=True))
        whole._loss_squares, whole._total_loss = reduced[-2:]
        whole._maxima = dict(zip(self._maxima, gang.max(list(self._maxima.values())), strict=True))
        if (load := self._expert_load) is not None:
            # Ranks that hold parts of the same layers route the same tokens: they count several times, which changes no
            # share.
            whole._expert_load = torch.tensor(gang.sum(load.flatten().tolist())).view(load.shape)
        return whole

    @classmethod
    def merged(cls, steps: Sequence["StepMetrics"]) -> "StepMetrics":
        """Return the measurements of several optimizer steps of one batch as one.

        `loss/mean` is the mean of their losses.
        """
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
        """Return whether the total loss and the sum of entropies are finite."""
        return math.isfinite(self._total_loss) and math.isfinite(self._sums["entropy"])

    def values(self) -> dict[str, float]:
        """Return the step's metrics by name; a mean over no tokens is left out."""
        sums, counts, maxima = self._sums, self._counts, self._maxima
        means = {name: sums[name] / counts[name] for name in sums if counts[name]}
        metrics = {f"{name}/mean": value for name, value in means.items()}
        if counts["loss"]:
            variance = self._loss_squares / counts["loss"] - means["loss"] ** 2
            # The difference of two means may be negative by rounding.
            metrics["loss/std"] = max(variance, 0.0) ** 0.5
            metrics["loss/max"] = maxima["loss"]
        # Not the mean over tokens but the loss as it was minimised, whose terms have divisors of their own.
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
                # Kish's effective sample size as a share of the tokens, (Σ r)² / (n Σ r²).
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
        """Return the suffixes of metrics' names: empty for the whole batch, then "/ENV" for each environment."""
        return ("", *(f"/{env}" for env in self._envs))

    def _add_ratio(self, log_ratio_BT: torch.Tensor, members: torch.Tensor, micro_batch: MicroBatch) -> None:
        """Add exp(log-ratio) at the tokens in `members`, its square, and its minimum; the log-ratio is bounded."""
        ratio_BT = log_ratio_BT.double().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
        self._add_by_env("ratio", ratio_BT, members, micro_batch)
        self._add_by_env("ratio_squared", ratio_BT**2, members, micro_batch)
        for scope, own in self._members_by_scope(members, micro_batch):
            if (selected := ratio_BT[own]).numel():
                self._maxima[f"-ratio{scope}"] = max(self._maxima[f"-ratio{scope}"], -float(selected.min()))

    def _members_by_scope(self, members: torch.Tensor, micro_batch: MicroBatch) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each environment in the micro-batch with its tokens in `members`: the suffix "/ENV" and bool [B, T].

        The last pair has the empty suffix and all members.
        """
        for env in self._envs:
            if env in micro_batch.env_B:
                rows = torch.tensor([each == env for each in micro_batch.env_B], device=members.device)[:, None]
                yield f"/{env}", members & rows
        yield "", members

    def _add_by_env(self, name: str, values: torch.Tensor, members: torch.Tensor, micro_batch: MicroBatch) -> float:
        """Add values [B, T] at `members` to the metric and to that of each environment; return their sum."""
        own = 0.0
        for scope, selected in self._members_by_scope(members, micro_batch):
            own = self._add(f"{name}{scope}", values, selected)
        return own

    def _add(self, name: str, values: torch.Tensor, members: torch.Tensor) -> float:
        """Add values [B, T] at `members` to sum, count and maximum of one metric; return their sum."""
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


NOT_RECORDED, NOT_FITTING = "none recorded", "of another model"


class ReplayWatch:
    """Follows whether engines record the experts of tokens, and reports once when they stop, or never did."""

    def __init__(self) -> None:
        self._reported = set[str]()

    def news(self, metrics: Mapping[str, float]) -> list[str]:
        """Add a step's metrics; return what is wrong with the recorded experts for the first time.

        It is NOT_RECORDED if experts were to be replayed and none were recorded, and NOT_FITTING if some are of another
        model. It is the first time again after a step in which that was right.
        """
        share, misfit = metrics.get(f"{REPLAYED}/mean"), metrics.get(f"{MISFIT}/mean", 0.0)
        if share is None:
            return []
        wrong = {NOT_FITTING} if misfit > 0 else ({NOT_RECORDED} if share == 0 else set[str]())
        new, self._reported = sorted(wrong - self._reported), wrong
        return new


# How far the trainer's log-probs and the engine's agree on tokens that one version produced.


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """Over sampled tokens: mean of k3 = exp(d) - d - 1 with d = trainer - inference log-prob, and the largest |d|.

    `num_outside_tokens` were sampled, but the truncation (top-p, …) excludes them under the trainer's policy: tokens
    at its border, where engine and trainer round differently.
    """

    num_tokens: int
    mismatch_kl: float
    max_abs_logprob_diff: float
    num_other_version_tokens: int
    num_outside_tokens: int = 0


class Score:
    """Adds up micro-batches; tokens of another version are only counted, because their log-probs have to differ."""

    def __init__(self) -> None:
        self._sums = [0.0] * 4  # k3, tokens, tokens of other versions, tokens outside of what the truncation leaves
        self._max_difference = 0.0

    def add(self, micro_batch: MicroBatch, trainer_logprobs_BT: torch.Tensor, *, version: int) -> None:
        """Add a micro-batch's sampled tokens, with their log-probs under policy version `version`.

        Tokens of samples that another version produced in part, and tokens that truncation excludes, are only counted.
        """
        is_version_B = torch.tensor(
            [versions == (version, version) for versions in micro_batch.versions_B],
            device=trainer_logprobs_BT.device,
            dtype=torch.bool,
        )
        sampled = micro_batch.loss_mask_BT
        is_outside = outside_support(trainer_logprobs_BT)
        scored = sampled & is_version_B[:, None] & ~is_outside
        difference = (trainer_logprobs_BT - micro_batch.inference_logprobs_BT)[scored].double()
        self._sums[0] += float(k3(difference).sum())
        self._sums[1] += difference.numel()
        self._sums[2] += int((sampled & ~is_version_B[:, None]).sum())
        self._sums[3] += int((sampled & is_version_B[:, None] & is_outside).sum())
        if difference.numel():
            self._max_difference = max(self._max_difference, float(difference.abs().max()))

    def reduce(self, gang: Gang) -> ScoreResult:
        """Return the result over all ranks; the mean is NaN if no token was scored. Collective in a gang."""
        kl, num_tokens, num_other, num_outside = gang.sum_of_data(self._sums)
        return ScoreResult(
            num_tokens=int(num_tokens),
            mismatch_kl=kl / num_tokens if num_tokens else math.nan,
            max_abs_logprob_diff=gang.max([self._max_difference])[0],
            num_other_version_tokens=int(num_other),
            num_outside_tokens=int(num_outside),
        )


# Warnings about a step: numbers that are not finite, and trainer and engine that drift apart.
#
# Shape suffixes: B rows, T padded length.

_RECENT_STEPS = 5
_EARLIER_STEPS = 20
_KL_FACTOR = 10.0
# Below this no policy gradient is visibly wrong, however much it has grown: bf16 alone gives about 1e-3.
_LEAST_KL = 0.01
# Above it for so many steps trainer and engine sample from different distributions, whatever it was before: a learning
# rate that is too high gets there in the first steps, when there is no trend yet.
_MOST_KL = 0.5
_MOST_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class NotFinite:
    """The first token of a sample whose loss or entropy is not finite; `sample` is its index in the sample table."""

    sample: int
    token: int
    what: str
    numbers: str


@torch.no_grad()
def find_not_finite(
    micro_batch: MicroBatch,
    rows: Sequence[int],
    *,
    losses: TokenLosses,
    trainer_logprobs_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
) -> list[NotFinite]:
    """Return the first token whose loss or entropy is not finite of each sample of a micro-batch that has one.

    `rows` are the samples' indices in the batch's sample table. If every token is finite, so that only the sum
    overflows, the token with the largest loss is returned.
    """
    loss_BT = (losses.rl + losses.ce).abs()
    is_loss_BT = ~torch.isfinite(loss_BT)
    is_bad_BT = is_loss_BT | (~torch.isfinite(entropy_BT) & micro_batch.loss_mask_BT)
    if not is_bad_BT.any():
        is_loss_BT = is_bad_BT = loss_BT == loss_BT.max()
    found: list[NotFinite] = []
    for row in torch.nonzero(is_bad_BT.any(dim=1)).flatten().tolist():
        token = int(torch.nonzero(is_bad_BT[row])[0])
        numbers = {
            "token id": int(micro_batch.token_ids_BT[row, token]),
            "trainer's log-prob": float(trainer_logprobs_BT[row, token]),
            "engine's": float(micro_batch.inference_logprobs_BT[row, token]),
            "advantage": float(losses.advantages[row, token]),
        }
        what = "loss" if is_loss_BT[row, token] else "entropy"
        text = ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())
        found.append(NotFinite(sample=rows[row], token=token, what=what, numbers=text))
    return found


def describe_not_finite(header: batch_pb2.BatchHeader, found: Sequence[NotFinite]) -> str:
    """Return a sentence that says which samples of a batch are not finite, and at which token first.

    `found` has at least one entry, in any order. Indices from the number of the header's samples on are rows of
    `trainer.dataset`.
    """
    first, num_samples = min(found), len(header.samples)
    if first.sample >= num_samples:
        return (
            f"the {first.what} of step {header.step + 1} is not finite in row {first.sample - num_samples} of those "
            f"that it took of trainer.dataset, at its token {first.token} ({first.numbers})"
        )
    sample = header.samples[first.sample]
    which = ", ".join(str(each.sample) for each in sorted(found)[:8]) + (", …" if len(found) > 8 else "")
    return (
        f"the {first.what} of batch {header.step} is not finite in {len(found)} of its {len(header.samples)} samples "
        f"({which}), first in sample {first.sample} (ordinal {sample.ordinal}, member {sample.member}, attempt "
        f"{sample.attempt}) at its token {first.token} ({first.numbers})"
    )


class KlTrend:
    """Follows the mismatch of trainer and engine over the steps, and reports when it grows or is large."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=_EARLIER_STEPS + _RECENT_STEPS)
        self._reported = 0.0
        """The mismatch that was last reported; 0 if it has fallen since."""

    def add(self, step: int, mismatch_kl: float) -> str:
        """Add the mean mismatch KL of step `step`; return a sentence to report, or "" if there is nothing to report.

        There is if the median of the last steps is ten times that of the steps before, or if the mismatch has been
        large for three steps. Each growth is reported once.
        """
        self._steps.append((step, mismatch_kl if math.isfinite(mismatch_kl) else math.inf))
        return self._growth() or self._excess()

    def _excess(self) -> str:
        """Return a sentence if the last steps' mismatch was large in each, and no growth is reported yet, else ""."""
        last = list(self._steps)[-_MOST_STEPS:]
        if self._reported or len(last) < _MOST_STEPS or min(kl for _, kl in last) < _MOST_KL:
            return ""
        self._reported = median(kl for _, kl in last)
        return f"mismatch_kl is {self._reported:.3g} ({_shown(last)})"

    def _growth(self) -> str:
        """Return a sentence if the mismatch grew tenfold over the earlier steps and over the last report, else ""."""
        if len(self._steps) < 2 * _RECENT_STEPS:
            return ""
        steps = list(self._steps)
        earlier, recent = steps[:-_RECENT_STEPS], steps[-_RECENT_STEPS:]
        before, now = (median(kl for _, kl in part) for part in (earlier, recent))
        if now < max(_LEAST_KL, _KL_FACTOR * before):
            self._reported = self._reported if now >= self._reported / 2 else 0.0
            return ""
        # What was reported is reported again only after a further tenfold growth.
        if self._reported and now < _KL_FACTOR * self._reported:
            return ""
        self._reported = now
        return (
            f"mismatch_kl rose from {before:.3g} (median of the steps {earlier[0][0]} to {earlier[-1][0]}) to "
            f"{now:.3g} ({_shown(recent)})"
        )


class Disagreement:
    """Follows the mismatch on tokens that the trained version sampled itself, which no learning explains."""

    def __init__(self) -> None:
        self._last = self._reported = 0.0

    @property
    def is_large(self) -> bool:
        """Return whether the mismatch of engine and trainer on the same weights was large when it was last measured."""
        return self._last >= _LEAST_KL

    def add(self, step: int, metrics: Mapping[str, float]) -> str:
        """Add the metrics of step `step`.

        Return a sentence if engine and trainer disagree on the same weights, else "". Reported is a mismatch above 0.01
        on tokens that the trained version sampled itself, again after each tenfold growth. Metrics without such tokens
        change nothing.
        """
        found = metrics.get(f"{ON_POLICY_KL}/mean")
        if found is None:
            return ""
        self._last = found if math.isfinite(found) else math.inf
        if not self.is_large:
            self._reported = 0.0
            return ""
        if self._reported and self._last < _KL_FACTOR * self._reported:
            return ""
        self._reported = self._last
        prefix, suffix = f"{ON_POLICY_KL}/", "/mean"
        by_env = {
            name.removeprefix(prefix).removesuffix(suffix): value
            for name, value in metrics.items()
            if name.startswith(prefix) and name != f"{ON_POLICY_KL}/mean"
        }
        worst = max(by_env, key=lambda env: by_env[env], default="")
        of_env = f", and {by_env[worst]:.3g} in environment {worst!r}" if len(by_env) > 1 else ""
        return (
            f"engine and trainer disagree on tokens that the trained version itself sampled: their mismatch_kl in step "
            f"{step} is {found:.3g}{of_env}, where float32 gives 1e-9 and bf16 1e-3. They compute differently, and the "
            "learning rate has no part in it: look at what changes the engine's distribution (penalties, min_tokens, "
            "extra_body), at its dtype and quantization, and at trainer.model.dtype"
        )


def _shown(steps: Sequence[tuple[int, float]]) -> str:
    """Return steps and mismatches as text for a message; `steps` are pairs of both."""
    return f"steps {steps[0][0]} to {steps[-1][0]}: {', '.join(f'{kl:.3g}' for _, kl in steps)}"
