"""AdamW, Muon or SGD on master weights, with gradient clipping and the schedule."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Muon

from millrace.config.sections.trainer import OptimConfig, SchedulerConfig
from millrace.trainer.learning.optimizer_state import StateKeeping, brought
from millrace.trainer.learning.scheduler import learning_rate

T = TypeVar("T", bound=torch.Tensor)

_PARTS = 4
"""More than a parameter's state has."""


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
        self,
        model: nn.Module,
        *,
        optim: OptimConfig,
        scheduler: SchedulerConfig,
        max_steps: int | None,
        offloads_state: bool = False,
    ) -> None:
        self._optim = optim
        self._scheduler = scheduler
        self._max_steps = max_steps
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in self._named]
        dtype = torch.bfloat16 if optim.state_dtype == "bfloat16" else None
        self._keeping = StateKeeping(dtype=dtype, offloads=offloads_state)
        self._optimizers = _optimizers(model, self._parameters, optim, is_apart=not self._keeping.is_plain)
        for optimizer in self._optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                # Optimizers make their state at the first step; made here, loading a checkpoint finds tensors to fill.
                optimizer.state[parameter] = _fresh_state(optimizer, parameter, self._keeping)

    def step(self, step: int, *, skips: bool = False) -> OptimizerReport:
        """Clip the gradient, apply it at the learning rate of step `step` (from 0) and clear it.

        A learning rate of 0 writes nothing: even `p * 1 - 0` could turn -0.0 into 0.0. A gradient that is not
        finite writes nothing either, and neither does a step that `skips`; the report says so, and so must the caller.
        """
        lr = learning_rate(step, lr=self._optim.lr, config=self._scheduler, max_steps=self._max_steps)
        grad_norm = clip(self._parameters, max_norm=self._optim.max_norm)
        was_skipped = skips or not math.isfinite(grad_norm)
        for number, optimizer in enumerate(self._optimizers):
            if lr != 0 and not was_skipped:
                for group in optimizer.param_groups:
                    group["lr"] = lr
                if self._keeping.is_plain:
                    optimizer.step()
                else:
                    with brought(optimizer, salt=(step * len(self._optimizers) + number) * _PARTS):
                        optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return OptimizerReport(lr=lr, grad_norm=grad_norm, num_skipped=int(was_skipped))

    def state_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """The state as live tensors, by parameter name; filling them in place restores it."""
        state = {parameter: parts for optimizer in self._optimizers for parameter, parts in optimizer.state.items()}
        return {name: dict(state[parameter]) for name, parameter in self._named}


def _optimizers(
    model: nn.Module, parameters: list[nn.Parameter], optim: OptimConfig, *, is_apart: bool
) -> list[torch.optim.Optimizer]:
    """Torch's own; Muon takes the matrices of the hidden layers, and AdamW what is left.

    `is_apart` makes one for each parameter, so that the state of one at a time is there.
    """
    grouped: Callable[[Sequence[nn.Parameter]], list[list[nn.Parameter]]] = _by_mesh
    if is_apart:
        grouped = _apart
    decay = optim.weight_decay
    if optim.type == "sgd":
        nesterov = optim.nesterov and optim.momentum > 0
        return [
            SGD(alike, lr=optim.lr, momentum=optim.momentum, nesterov=nesterov, weight_decay=decay)
            for alike in grouped(parameters)
        ]
    matrices = _hidden_matrices(model, parameters) if optim.type == "muon" else []
    taken = set(map(id, matrices))
    others = [parameter for parameter in parameters if id(parameter) not in taken]
    adamw = partial(AdamW, lr=optim.lr, betas=(optim.betas1, optim.betas2), weight_decay=decay, fused=True)
    optimizers: list[torch.optim.Optimizer] = list(map(adamw, grouped(others)))
    # Steps of the size of AdamW's, so that one learning rate and one weight decay fit both.
    muon = partial(Muon, lr=optim.lr, momentum=optim.mu, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    if matrices:
        optimizers += map(muon, grouped(matrices) if is_apart else [matrices])
    return optimizers


def _apart(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    return [[parameter] for parameter in parameters]


def _hidden_matrices(model: nn.Module, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Weights of two dimensions, but those of embeddings and of the head."""
    find_head = getattr(model, "get_output_embeddings", lambda: None)
    ends = [module for module in model.modules() if isinstance(module, nn.Embedding)] + [find_head()]
    outer = {id(parameter) for end in ends if end is not None for parameter in end.parameters()}
    return [parameter for parameter in parameters if parameter.ndim == 2 and id(parameter) not in outer]


def _fresh_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, keeping: StateKeeping
) -> dict[str, torch.Tensor]:
    """What the optimizer would make for a parameter at its first step."""
    if isinstance(optimizer, AdamW):
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, "exp_avg": keeping.zeros(parameter), "exp_avg_sq": keeping.zeros(parameter)}
    return {"momentum_buffer": keeping.zeros(parameter)} if optimizer.param_groups[0]["momentum"] else {}


def clip(parameters: Sequence[nn.Parameter], *, max_norm: float) -> float:
    """Scale the gradients down to a global norm; the norm before. Collective in a gang."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len(_by_mesh(parameters)) < 2 and _are_float32(gradients):
        norm = nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=False)
        return whole_norm(norm)
    norm = norm_of(gradients)
    for gradient in gradients:
        gradient.mul_(min(max_norm / (norm + 1e-6), 1.0))
    return norm


def norm_of(gradients: Sequence[torch.Tensor]) -> float:
    """The norm of all gradients, also of those that are cut over different ranks. Collective in a gang."""
    parts = [whole_norm(_total_norm(alike)) for alike in _by_mesh(gradients)]
    return parts[0] if len(parts) == 1 else math.hypot(*parts)


def _total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm in float32; torch's own is rounded to the gradients' format, once a tensor and once more in the end.

    In bfloat16 that is half a percent, another one for each number of ranks.
    """
    if _are_float32(gradients):
        return nn.utils.get_total_norm(gradients)
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients])
    )


def _are_float32(gradients: Sequence[torch.Tensor]) -> bool:
    return all(gradient.dtype == torch.float32 for gradient in gradients)


def whole_norm(norm: torch.Tensor) -> float:
    """A norm over all ranks, of which each may have computed its part. Collective in a gang."""
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _by_mesh(tensors: Sequence[T]) -> list[list[T]]:
    """Tensors that are cut over equal ranks, together: torch computes with no others at once."""
    alike: dict[Any, list[T]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        alike.setdefault(mesh, []).append(tensor)
    return list(alike.values())
