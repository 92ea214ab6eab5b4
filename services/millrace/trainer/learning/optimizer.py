"""AdamW on float32 master weights, with gradient clipping and the schedule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from millrace.config.sections.trainer import OptimConfig, SchedulerConfig
from millrace.trainer.learning.scheduler import learning_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerReport:
    """What the optimizer steps of one batch did. `num_skipped` of them left the weights as they were.

    Their loss or gradient was not finite. `grad_norm` is the mean over the others, if there are any.
    """

    lr: float
    grad_norm: float
    num_steps: int = 1
    num_skipped: int = 0

    @property
    def was_skipped(self) -> bool:
        """Whether nothing changed at all."""
        return self.num_skipped == self.num_steps

    @classmethod
    def merged(cls, steps: Sequence["OptimizerReport"]) -> "OptimizerReport":
        """That of several steps, as one."""
        taken = [each for each in steps if not each.was_skipped] or steps
        return cls(
            lr=steps[0].lr,
            grad_norm=fmean(each.grad_norm for each in taken),
            num_steps=sum(each.num_steps for each in steps),
            num_skipped=sum(each.num_skipped for each in steps),
        )


class PolicyOptimizer:
    """Steps the model's parameters. The state is plain tensors by parameter name, so a checkpoint needs no pickle."""

    def __init__(
        self, model: nn.Module, *, optim: OptimConfig, scheduler: SchedulerConfig, max_steps: int | None
    ) -> None:
        self._optim = optim
        self._scheduler = scheduler
        self._max_steps = max_steps
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in self._named]
        self._adamw = torch.optim.AdamW(
            self._parameters,
            lr=optim.lr,
            betas=(optim.betas1, optim.betas2),
            weight_decay=optim.weight_decay,
        )
        for parameter in self._parameters:
            # AdamW makes its state at the first step; made here, loading a checkpoint finds tensors to fill.
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }

    def step(self, step: int, *, skips: bool = False) -> OptimizerReport:
        """Clip the gradient, apply it at the learning rate of step `step` (from 0) and clear it.

        A learning rate of 0 writes nothing: even AdamW's `p * 1 - 0` could turn -0.0 into 0.0. A gradient that is not
        finite writes nothing either, and neither does a step that `skips`; the report says so, and so must the caller.
        """
        lr = learning_rate(step, lr=self._optim.lr, config=self._scheduler, max_steps=self._max_steps)
        norm = nn.utils.clip_grad_norm_(self._parameters, self._optim.max_norm, error_if_nonfinite=False)
        grad_norm = whole_norm(norm)
        was_skipped = skips or not math.isfinite(grad_norm)
        if lr != 0 and not was_skipped:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return OptimizerReport(lr=lr, grad_norm=grad_norm, num_skipped=int(was_skipped))

    def state_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """The state as live tensors, by parameter name; filling them in place restores it."""
        return {name: dict(self._adamw.state[parameter]) for name, parameter in self._named}


def whole_norm(norm: torch.Tensor) -> float:
    """A norm over all ranks, of which each may have computed its part. Collective in a gang."""
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
