"""AdamW, Muon or SGD on master weights, with gradient clipping and the schedule."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Muon

from millrace.config.sections.trainer import OptimConfig, SchedulerConfig
from millrace.device_digest import mixed
from millrace.errors import InvalidSpecError, Violation
from millrace.trainer.model.mesh import held

T = TypeVar("T", bound=torch.Tensor)

_PARTS = 4
"""More than a parameter's state has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerReport:
    """What the optimizer steps of one batch did.

    `num_skipped` steps left the weights as they were, because loss or gradient was not finite. `grad_norm` is the mean
    over the other steps, or over all if every one was skipped.
    """

    lr: float
    grad_norm: float
    num_steps: int = 1
    num_skipped: int = 0

    @property
    def was_skipped(self) -> bool:
        """Return whether every step was skipped."""
        return self.num_skipped == self.num_steps

    @classmethod
    def merged(cls, steps: Sequence["OptimizerReport"]) -> "OptimizerReport":
        """Return the reports of a batch's optimizer steps as one, with the learning rate of the first."""
        taken = [each for each in steps if not each.was_skipped] or steps
        return cls(
            lr=steps[0].lr,
            grad_norm=fmean(each.grad_norm for each in taken),
            num_steps=sum(each.num_steps for each in steps),
            num_skipped=sum(each.num_skipped for each in steps),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """The settings of one AdamW step, for who chooses them step by step. `max_norm` None does not clip."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_norm: float | None


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
        """Make the optimizer of the model's trainable parameters, with state of zeros for each.

        `max_steps` is the run's last step, which schedules that decay need. `offloads_state` holds the state in host
        memory between steps.
        """
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
        """Clip the gradient, apply it at the learning rate of step `step` (from 0), and clear it. Collective in a gang.

        Weights stay as they are at a learning rate of 0 (even `p * 1 - 0` could turn -0.0 into 0.0), if the gradient is
        not finite, and with `skips`; in the last two cases the report has `num_skipped` 1.
        """
        lr = learning_rate(step, lr=self._optim.lr, config=self._scheduler, max_steps=self._max_steps)
        return self._step(step, lr=lr, max_norm=self._optim.max_norm, skips=skips)

    def step_as(self, step: int, adam: AdamParams) -> OptimizerReport:
        """Take step `step` (from 0) with these settings in place of the configured ones. Collective in a gang.

        They stay for later steps, except for learning rate and `max_norm`. Weights stay as in `step`. The configured
        optimizer must be AdamW.
        """
        for optimizer in self._optimizers:
            assert isinstance(optimizer, AdamW)
            for group in optimizer.param_groups:
                group |= {"betas": adam.betas, "eps": adam.eps, "weight_decay": adam.weight_decay}
        return self._step(step, lr=adam.lr, max_norm=adam.max_norm, skips=False)

    def _step(self, step: int, *, lr: float, max_norm: float | None, skips: bool) -> OptimizerReport:
        """Clip the gradient to `max_norm`, apply it at the learning rate `lr`, and clear it, as `step` says."""
        # Clipped also if the step will be skipped: the norm is collective, and it is reported. It is that of all ranks
        # together, so that a gradient that is not finite makes all of them skip.
        grad_norm = clip(self._parameters, max_norm=math.inf if max_norm is None else max_norm)
        was_skipped = skips or not math.isfinite(grad_norm)
        for number, optimizer in enumerate(self._optimizers):
            if lr != 0 and not was_skipped:
                for group in optimizer.param_groups:
                    group["lr"] = lr
                if self._keeping.is_plain:
                    optimizer.step()
                else:
                    # A salt for every step, optimizer and part of the state: no two roundings draw the same numbers.
                    with state_on_device(optimizer, salt=(step * len(self._optimizers) + number) * _PARTS):
                        optimizer.step()
            # Also after a skipped step, whose gradient would otherwise be added to the next one's.
            optimizer.zero_grad(set_to_none=True)
        return OptimizerReport(lr=lr, grad_norm=grad_norm, num_skipped=int(was_skipped))

    def state_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the state of each parameter, by the parameter's name and then by the state's, as live tensors.

        Filling them in place restores the state.
        """
        state = {parameter: parts for optimizer in self._optimizers for parameter, parts in optimizer.state.items()}
        return {name: dict(state[parameter]) for name, parameter in self._named}


def _optimizers(
    model: nn.Module, parameters: list[nn.Parameter], optim: OptimConfig, *, is_apart: bool
) -> list[torch.optim.Optimizer]:
    """Make torch's optimizers: SGD, AdamW, or Muon for the matrices of hidden layers with AdamW for the rest.

    With `is_apart` there is one for each parameter, so that only one parameter's state at a time is on the device.
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
    # Muon steps one matrix at a time, so that matrices on different meshes may share an optimizer.
    if matrices:
        optimizers += map(muon, grouped(matrices) if is_apart else [matrices])
    return optimizers


def _apart(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return each parameter as a group of its own."""
    return [[parameter] for parameter in parameters]


def _hidden_matrices(model: nn.Module, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return those of `parameters` that are matrices and do not belong to embeddings or head."""
    find_head = getattr(model, "get_output_embeddings", lambda: None)
    ends = [module for module in model.modules() if isinstance(module, nn.Embedding)] + [find_head()]
    outer = {id(parameter) for end in ends if end is not None for parameter in end.parameters()}
    return [parameter for parameter in parameters if parameter.ndim == 2 and id(parameter) not in outer]


# Optimizer state that is held in fewer bits, or in host memory, and is moved to its parameter for the step only.
#
# Rounded to the nearest, a second moment in bfloat16 would never decay: a step of `1 - betas2` is smaller than half
# of its last bit. So it is rounded up or down by chance, in proportion to the bits that are cut off. The chance is a
# function of the step, the parameter and the element: ranks that hold the same element round it alike, and so does a
# step that is repeated.

# Elements that are rounded at a time, whose places and draws are numbers of 64 bits.
_BLOCK_ELEMENTS = 1 << 24
_COUNTERS = ("step",)
"""Parts of a state that are counters, and are neither moved nor rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKeeping:
    """How the state is held between steps: `dtype` (None: the parameter's), and whether in host memory."""

    dtype: torch.dtype | None = None
    offloads: bool = False

    @property
    def is_plain(self) -> bool:
        """Return whether the state is held in the parameter's dtype and on its device, as torch does."""
        return self.dtype is None and not self.offloads

    def zeros(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return zeros in the shape of a parameter, with the dtype and on the device in which its state is held."""
        device = torch.device("cpu") if self.offloads else parameter.device
        dtype = self.dtype or parameter.dtype
        return torch.zeros_like(parameter, memory_format=torch.preserve_format, dtype=dtype, device=device)


@contextlib.contextmanager
def state_on_device(optimizer: torch.optim.Optimizer, *, salt: int) -> Iterator[None]:
    """Move the optimizer's state to its parameters' device and dtype during the block, and back, rounded, after it.

    `salt` seeds the rounding. After an error in the block the state stays moved.
    """
    kept: dict[torch.Tensor, Mapping[str, torch.Tensor]] = dict(optimizer.state)
    for parameter, parts in kept.items():
        optimizer.state[parameter] = {
            name: part if name in _COUNTERS else part.to(device=parameter.device, dtype=parameter.dtype)
            for name, part in parts.items()
        }
    yield
    for parameter, parts in kept.items():
        for number, (name, part) in enumerate(parts.items()):
            stepped = optimizer.state[parameter][name]
            # Counters are the held objects themselves, which the optimizer has stepped in place.
            if stepped is not part:
                _put(stepped, part, salt=salt + number)
        optimizer.state[parameter] = dict(parts)


@torch.no_grad()
def _put(value: torch.Tensor, place: torch.Tensor, *, salt: int) -> None:
    """Copy `value` into `place`, this rank's part of the state; float32 is rounded to bfloat16 by chance.

    `salt` and the element's index in the whole tensor seed the chance.
    """
    local = value
    if isinstance(value, DTensor):
        share = held(value)
        column = 0 if share.first_column is None else share.first_column
        # The chance depends on the element's place in the whole tensor, not on the rank that holds it.
        local, salt = value.to_local(), salt * 1_000_003 + share.start + column
    target = place.to_local() if isinstance(place, DTensor) else place
    if target.dtype == torch.bfloat16 and local.dtype == torch.float32:
        local = round_by_chance(local, salt=salt)
    target.copy_(local)


def round_by_chance(values: torch.Tensor, *, salt: int) -> torch.Tensor:
    """Round float32 to bfloat16, up with a probability in proportion to the bits that are cut off, in the same shape.

    The probability's draw is a function of `salt` and the element's index. Values that are not finite stay.
    """
    flat = values.reshape(-1)
    rounded = torch.empty_like(flat, dtype=torch.bfloat16)
    for begin in range(0, flat.numel(), _BLOCK_ELEMENTS):
        block = flat[begin : begin + _BLOCK_ELEMENTS]
        place = torch.arange(begin, begin + block.numel(), device=flat.device)
        chance = (mixed(place, salt=salt) & 0xFFFF).to(torch.int32)
        # bfloat16 is the upper half of float32: adding up to 0xFFFF carries into it as often as the lower half is
        # large.
        cut = (block.view(torch.int32) + chance) & ~0xFFFF
        # A nan whose bits are all set would carry over into -0.0.
        rounded[begin : begin + block.numel()] = torch.where(block.isfinite(), cut.view(torch.float32), block)
    return rounded.view(values.shape)


def _fresh_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, keeping: StateKeeping
) -> dict[str, torch.Tensor]:
    """Return the state, zeros by name, that the optimizer would make for a parameter at its first step.

    All but counters have the dtype and the device that `keeping` says.
    """
    if isinstance(optimizer, AdamW):
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, "exp_avg": keeping.zeros(parameter), "exp_avg_sq": keeping.zeros(parameter)}
    return {"momentum_buffer": keeping.zeros(parameter)} if optimizer.param_groups[0]["momentum"] else {}


def clip(parameters: Sequence[nn.Parameter], *, max_norm: float) -> float:
    """Scale the gradients, in place, down to a global norm of at most `max_norm`; return the norm before.

    Collective.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len(_by_mesh(parameters)) < 2 and _are_float32(gradients):
        # Torch's fused way, where it is exact: one mesh, and float32 throughout.
        norm = nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=False)
        return whole_norm(norm)
    norm = norm_of(gradients)
    for gradient in gradients:
        # As `torch.nn.utils.clip_grad_norm_` does it, with its epsilon.
        gradient.mul_(min(max_norm / (norm + 1e-6), 1.0))
    return norm


def norm_of(gradients: Sequence[torch.Tensor]) -> float:
    """Return the 2-norm of all gradients together, over all ranks where they are sharded. Collective in a gang."""
    parts = [whole_norm(_total_norm(alike)) for alike in _by_mesh(gradients)]
    return parts[0] if len(parts) == 1 else math.hypot(*parts)


def _total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of gradients of one mesh, in float32.

    Torch's own function rounds to the gradients' dtype, per tensor and in the end: in bfloat16 by half a percent, which
    differs with the number of ranks.
    """
    if _are_float32(gradients):
        return nn.utils.get_total_norm(gradients)
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients])
    )


def _are_float32(gradients: Sequence[torch.Tensor]) -> bool:
    return all(gradient.dtype == torch.float32 for gradient in gradients)


def whole_norm(norm: torch.Tensor) -> float:
    """Return a norm as a number; that of sharded gradients is combined over the ranks, which is collective."""
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _by_mesh(tensors: Sequence[T]) -> list[list[T]]:
    """Group tensors by their device mesh, because torch computes only on tensors of one mesh at a time.

    Tensors that are not sharded are one group.
    """
    alike: dict[Any, list[T]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        alike.setdefault(mesh, []).append(tensor)
    return list(alike.values())


# The learning rate as a pure function of the step, so that a resumed run needs no scheduler state.
#
#     constant: warm-up, then the peak
#     linear:   warm-up, the peak, then down in a straight line so that the last step has `min_lr` (WSD)
#     cosine:   warm-up, then half a cosine from the peak towards `min_lr`, which it would reach at step `max_steps`
#
# Warm-up rises from max(min_lr / lr, 1e-8) of the peak at step 0 to the peak at step `warmup_steps`. A linear decay
# of one step is that one step at `min_lr`.

_SMALLEST_START_FACTOR = 1e-8


def learning_rate(step: int, *, lr: float, config: SchedulerConfig, max_steps: int | None) -> float:
    """Return the learning rate of optimizer step `step` (from 0), where `lr` is the peak; 0 if the peak is 0.

    `max_steps` is the run's last step, which all schedules but "constant" need; raises InvalidSpecError without it.
    """
    if lr == 0:
        return 0.0
    if step < config.warmup_steps:
        start = max(config.min_lr / lr, _SMALLEST_START_FACTOR)
        return lr * (start + (1 - start) * step / config.warmup_steps)
    match config.type:
        case "constant":
            return lr
        case "linear":
            return _linear(step, lr=lr, config=config, max_steps=_require(max_steps, config))
        case "cosine":
            return _cosine(step, lr=lr, config=config, max_steps=_require(max_steps, config))


def _linear(step: int, *, lr: float, config: SchedulerConfig, max_steps: int) -> float:
    """Return the rate of a step after the warm-up: the peak `lr`, with a linear decay in the last `decay_steps`."""
    into_decay = step - (max_steps - config.decay_steps)
    if config.decay_steps == 0 or into_decay < 0:
        return lr
    # Of `decay_steps` steps the first has the peak and the last `min_lr`: there is one interval fewer than steps.
    progress = min(into_decay / (config.decay_steps - 1), 1.0) if config.decay_steps > 1 else 1.0
    return lr + (config.min_lr - lr) * progress


def _cosine(step: int, *, lr: float, config: SchedulerConfig, max_steps: int) -> float:
    """Return the rate of a step after the warm-up, on half a cosine from the peak `lr` to `min_lr` at `max_steps`."""
    span = max(max_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    return config.min_lr + (lr - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2


def _require(max_steps: int | None, config: SchedulerConfig) -> int:
    """Return `max_steps`; raise InvalidSpecError for None, which the config's rules should have refused before."""
    if max_steps is None:
        raise InvalidSpecError(
            [
                Violation(
                    field="max_steps", message=f"is needed by scheduler.type = {config.type!r}", source="run config"
                )
            ]
        )
    return max_steps
