"""Which key makes a run fit: the keys that save memory, in the order of what they cost, alone and then together."""

from collections.abc import Callable, Iterator
from typing import Any

from millrace.config.sections.trainer import ActivationCheckpointConfig, LoraConfig, TrainerConfig
from millrace.trainer.estimate.report import Trial
from millrace.trainer.estimate.step import Simulated

Simulate = Callable[[TrainerConfig, int], Simulated]
_MOST_GPUS = 1024


def trials(config: TrainerConfig, *, num_gpus: int, limit: int, simulate: Simulate, prefix: str) -> Iterator[Trial]:
    """Changes up to the first that fits into `limit` bytes: each key alone, then one more at a time, then more GPUs."""
    changes = list(_changes(config, num_gpus=num_gpus, prefix=prefix))
    for key, update in changes:
        trial = _trial((key,), simulate(_changed(config, update), num_gpus), limit)
        yield trial
        if trial.fits:
            return
    together, keys = config, tuple[str, ...]()
    for key, update in changes:
        together, keys = _changed(together, update), (*(each for each in keys if _name(each) != _name(key)), key)
        if len(keys) > 1:
            trial = _trial(keys, simulate(together, num_gpus), limit)
            yield trial
            if trial.fits:
                return
    more = num_gpus * 2
    while num_gpus and more <= _MOST_GPUS:
        trial = _trial((*keys, f"--gpus {more}"), simulate(together, more), limit)
        yield trial
        if trial.fits:
            return
        more *= 2


def _trial(keys: tuple[str, ...], simulated: Simulated, limit: int) -> Trial:
    return Trial(keys=keys, peak=simulated.peak, fits=simulated.peak <= limit)


def _changes(config: TrainerConfig, *, num_gpus: int, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the run does not do yet: the key as one writes it, and its update of the section."""
    model = config.model
    if model.ac is None:
        selective = ActivationCheckpointConfig(mode="selective")
        yield f'{prefix}model.ac.mode = "selective"', {"model": {"ac": selective}}
    if model.ac is None or model.ac.mode == "selective" or model.ac.freq > 1:
        yield f'{prefix}model.ac.mode = "full"', {"model": {"ac": ActivationCheckpointConfig()}}
    is_kept = model.reshard_after_forward is False or (model.reshard_after_forward is None and num_gpus == 1)
    if num_gpus and is_kept:
        yield f"{prefix}model.reshard_after_forward = true", {"model": {"reshard_after_forward": True}}
    if config.micro_batch_tokens >= 2 * model.seq_len:
        yield f"{prefix}micro_batch_tokens = {model.seq_len}", {"micro_batch_tokens": model.seq_len}
    if num_gpus and not model.fsdp_cpu_offload:
        yield f"{prefix}model.fsdp_cpu_offload = true", {"model": {"fsdp_cpu_offload": True}}
    if model.lora is None:
        yield f"{prefix}model.lora.rank = 16", {"model": {"lora": LoraConfig()}}


def _changed(config: TrainerConfig, update: dict[str, Any]) -> TrainerConfig:
    inner = {"model": config.model.model_copy(update=update["model"])} if "model" in update else {}
    return config.model_copy(update=update | inner)


def _name(key: str) -> str:
    return key.partition(" = ")[0]
