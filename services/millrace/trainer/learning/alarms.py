"""What is wrong with a step, in words: numbers that are not finite, and trainer and engine that drift apart.

Shape suffixes: B rows, T padded length.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from millrace.internal.v1 import batch_pb2
from millrace.trainer.learning.batch import MicroBatch
from millrace.trainer.learning.metrics import ON_POLICY_KL
from millrace.trainer.losses.base import TokenLosses

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
    """The first token of a sample whose loss or entropy is not finite; `sample` is its place in the sample table."""

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
    """The samples of a micro-batch that are not finite; `rows` are their places in the batch's sample table.

    Where only the sum of the losses is too large for its number format, it is the token with the largest loss.
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
    """In which samples of a batch, and at which token first."""
    first = min(found)
    sample = header.samples[first.sample]
    which = ", ".join(str(each.sample) for each in sorted(found)[:8]) + (", …" if len(found) > 8 else "")
    return (
        f"the {first.what} of batch {header.step} is not finite in {len(found)} of its {len(header.samples)} samples "
        f"({which}), first in sample {first.sample} (ordinal {sample.ordinal}, member {sample.member}, attempt "
        f"{sample.attempt}) at its token {first.token} ({first.numbers})"
    )


class KlTrend:
    """Watches the mismatch of trainer and engine over the steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=_EARLIER_STEPS + _RECENT_STEPS)
        self._told = 0.0
        """The mismatch that was told of last; 0 if it has fallen since."""

    def add(self, step: int, mismatch_kl: float) -> str:
        """Take a step's mean; in words how it has grown, once per growth, or how large it is, else empty."""
        self._steps.append((step, mismatch_kl if math.isfinite(mismatch_kl) else math.inf))
        return self._growth() or self._excess()

    def _excess(self) -> str:
        last = list(self._steps)[-_MOST_STEPS:]
        if self._told or len(last) < _MOST_STEPS or min(kl for _, kl in last) < _MOST_KL:
            return ""
        self._told = median(kl for _, kl in last)
        return f"mismatch_kl is {self._told:.3g} ({_shown(last)})"

    def _growth(self) -> str:
        if len(self._steps) < 2 * _RECENT_STEPS:
            return ""
        steps = list(self._steps)
        earlier, recent = steps[:-_RECENT_STEPS], steps[-_RECENT_STEPS:]
        before, now = (median(kl for _, kl in part) for part in (earlier, recent))
        if now < max(_LEAST_KL, _KL_FACTOR * before):
            self._told = self._told if now >= self._told / 2 else 0.0
            return ""
        if self._told and now < _KL_FACTOR * self._told:
            return ""
        self._told = now
        return (
            f"mismatch_kl rose from {before:.3g} (median of the steps {earlier[0][0]} to {earlier[-1][0]}) to "
            f"{now:.3g} ({_shown(recent)})"
        )


class Disagreement:
    """Watches the mismatch on tokens that the very version sampled which is trained: no learning explains it."""

    def __init__(self) -> None:
        self._last = self._told = 0.0

    @property
    def is_large(self) -> bool:
        """Whether it was large when there were such tokens last."""
        return self._last >= _LEAST_KL

    def add(self, step: int, metrics: Mapping[str, float]) -> str:
        """Take a step's metrics; in words how much both disagree, once per tenfold growth, else empty."""
        found = metrics.get(f"{ON_POLICY_KL}/mean")
        if found is None:
            return ""
        self._last = found if math.isfinite(found) else math.inf
        if not self.is_large:
            self._told = 0.0
            return ""
        if self._told and self._last < _KL_FACTOR * self._told:
            return ""
        self._told = self._last
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
    return f"steps {steps[0][0]} to {steps[-1][0]}: {', '.join(f'{kl:.3g}' for _, kl in steps)}"
