"""What a training step takes of memory and time, before anything is paid for it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from millrace.config.sections.sft import SFTConfig
from millrace.config.sections.trainer import ActivationCheckpointConfig, LoraConfig, TrainerConfig
from millrace.errors import NotFoundError
from millrace.models.configs import read_config
from millrace.trainer.estimate_report import Estimate, Trial
from millrace.trainer.estimate_step import Simulated, simulate
from millrace.trainer.model.fit import require_layout

_GIB = 2**30


def estimate(
    config: TrainerConfig | SFTConfig,
    *,
    num_gpus: int,
    gpu_memory: float,
    reserve: float,
    mfu: float,
    tflops: float | None,
    on_trial: Callable[[], None] = lambda: None,
) -> Estimate:
    """Simulate a step to estimate the memory of a run and, if it exceeds the limit, try keys that reduce it.

    `config` is the run's `[trainer]`, or a fine-tuning. The limit is `gpu_memory` less `reserve`, in GiB. With
    `num_gpus` 0 it is one process on a CPU. `mfu` (0 to 1) and `tflops` (a GPU's peak; None: unknown) serve only for
    the speed. `on_trial` is called before each simulated step. Raises NotFoundError (MODEL_NOT_FOUND) if transformers
    has no such model, and InvalidSpecError for a number of ranks that a run would not start with.
    """
    prefix, is_paired = "trainer.", False
    if isinstance(config, SFTConfig):
        prefix, is_paired, config = "", config.dpo is not None, config.as_trainer()
    model_config = load_config(config.model.name)
    require_layout(config.model, model_config.to_dict(), world_size=max(num_gpus, 1), prefix=f"{prefix}model")

    def step(changed: TrainerConfig, gpus: int) -> Simulated:
        on_trial()
        return simulate(changed, model_config, num_gpus=gpus)

    found, limit = step(config, num_gpus), int((gpu_memory - reserve) * _GIB)
    tried = []
    if found.peak > limit:
        tried = list(trials(config, num_gpus=num_gpus, limit=limit, simulate=step, prefix=prefix, is_paired=is_paired))
    length = config.model.seq_len
    per_token = found.flops.of_samples([length]) / length
    speed = None if tflops is None else mfu * tflops * 1e12 * max(num_gpus, 1) / per_token
    return Estimate(
        model=config.model.name,
        num_parameters=found.num_parameters,
        num_trained=found.num_trained,
        num_gpus=num_gpus,
        rows=found.rows,
        seq_len=length,
        device=found.device,
        host=found.host,
        limit=limit,
        reserve=int(reserve * _GIB),
        flops_per_token=per_token,
        mfu=mfu,
        tokens_per_s=speed,
        trials=tried,
    )


def load_config(name: str) -> Any:
    """Load the Hugging Face config of a causal model, by directory or Hub id, without the weights.

    Raises NotFoundError if there is none, or it is not of a causal language model that transformers knows, and
    CorruptObjectError (MODEL_FILE_UNUSABLE) if a directory's config.json is damaged.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    path = Path(name).expanduser()
    try:
        if path.is_dir() and not (path / "config.json").exists():
            raise FileNotFoundError("the directory holds no config.json")
        found = read_config(path) if path.is_dir() else AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise NotFoundError(
            f"the config of model {name!r} cannot be read: {str(error).strip().partition(chr(10))[0]}",
            reason="MODEL_NOT_FOUND",
            remedy="set model.name to a directory with a config.json (no weights are needed), or to a Hub id that "
            "this machine can reach",
            metadata={"model": name},
        ) from error
    if type(found) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise NotFoundError(
            f"model {name!r} is of type {found.model_type}, of which transformers has no causal language model",
            reason="MODEL_NOT_FOUND",
            remedy="set model.name to a model that generates text from left to right",
            metadata={"model": name},
        )
    return found


# Which key makes a run fit: the keys that save memory, in the order of what they cost, alone and then together.

Simulate = Callable[[TrainerConfig, int], Simulated]
_MOST_GPUS = 1024


def trials(
    config: TrainerConfig, *, num_gpus: int, limit: int, simulate: Simulate, prefix: str, is_paired: bool = False
) -> Iterator[Trial]:
    """Simulate and yield changes of the config up to the first that fits into `limit` bytes.

    They are each key alone, then the keys cumulatively, then all of them with twice as many GPUs, and so on. `simulate`
    simulates a step of a config on a number of GPUs; `prefix` is put before the keys. With `is_paired` a micro-batch
    has two samples at least.
    """
    changes = list(_changes(config, num_gpus=num_gpus, prefix=prefix, is_paired=is_paired))
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


def _changes(
    config: TrainerConfig, *, num_gpus: int, prefix: str, is_paired: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each setting that saves memory and is not in use: as written in a config, and the fields to update.

    They come in the order of what they cost. `prefix` is put before the keys; `is_paired` is as in `trials`.
    """
    model = config.model
    least = model.seq_len * (2 if is_paired else 1)
    if model.ac is None:
        selective = ActivationCheckpointConfig(mode="selective")
        yield f'{prefix}model.ac.mode = "selective"', {"model": {"ac": selective}}
    if model.ac is None or model.ac.mode == "selective" or model.ac.freq > 1:
        yield f'{prefix}model.ac.mode = "full"', {"model": {"ac": ActivationCheckpointConfig()}}
    is_kept = model.reshard_after_forward is False or (model.reshard_after_forward is None and num_gpus == 1)
    if num_gpus and is_kept:
        yield f"{prefix}model.reshard_after_forward = true", {"model": {"reshard_after_forward": True}}
    if config.micro_batch_tokens >= 2 * least:
        yield f"{prefix}micro_batch_tokens = {least}", {"micro_batch_tokens": least}
    if num_gpus and not model.fsdp_cpu_offload:
        yield f"{prefix}model.fsdp_cpu_offload = true", {"model": {"fsdp_cpu_offload": True}}
    if model.lora is None:
        yield f"{prefix}model.lora.rank = 16", {"model": {"lora": LoraConfig()}}


def _changed(config: TrainerConfig, update: dict[str, Any]) -> TrainerConfig:
    inner = {"model": config.model.model_copy(update=update["model"])} if "model" in update else {}
    return config.model_copy(update=update | inner)


def _name(key: str) -> str:
    return key.partition(" = ")[0]
