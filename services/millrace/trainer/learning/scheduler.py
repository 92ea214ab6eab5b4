"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state.

    constant: warm-up, then the peak
    linear:   warm-up, the peak, then down in a straight line so that the last step has `min_lr` (WSD)
    cosine:   warm-up, then half a cosine from the peak towards `min_lr`, which it would reach at step `max_steps`

Warm-up rises from max(min_lr / lr, 1e-8) of the peak at step 0 to the peak at step `warmup_steps`. A linear decay of
one step is that one step at `min_lr`.
"""

import math

from millrace.config.sections.trainer import SchedulerConfig
from millrace.errors import InvalidSpecError, Violation

_SMALLEST_START_FACTOR = 1e-8


def learning_rate(step: int, *, lr: float, config: SchedulerConfig, max_steps: int | None) -> float:
    """Learning rate of optimizer step `step` (from 0). A peak of 0 is 0 everywhere."""
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
    """The peak, then the decay over the last `decay_steps` steps."""
    into_decay = step - (max_steps - config.decay_steps)
    if config.decay_steps == 0 or into_decay < 0:
        return lr
    progress = min(into_decay / (config.decay_steps - 1), 1.0) if config.decay_steps > 1 else 1.0
    return lr + (config.min_lr - lr) * progress


def _cosine(step: int, *, lr: float, config: SchedulerConfig, max_steps: int) -> float:
    """Half a cosine over the steps behind the warm-up."""
    span = max(max_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    return config.min_lr + (lr - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2


def _require(max_steps: int | None, config: SchedulerConfig) -> int:
    """`max_steps`, without which a decay has no end; the config's own rules catch this first."""
    if max_steps is None:
        raise InvalidSpecError(
            [
                Violation(
                    field="max_steps", message=f"is needed by scheduler.type = {config.type!r}", source="run config"
                )
            ]
        )
    return max_steps
