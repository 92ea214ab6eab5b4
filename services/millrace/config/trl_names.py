"""What the commonest keys of TRL's `GRPOConfig` and `SFTConfig` are called here, for messages about unknown keys."""

from collections.abc import Mapping
from types import MappingProxyType

from millrace.config.tree import Path, SchemaKey, dotted

RL: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType({
    "model_name_or_path": (("model.name",), ""),
    "per_device_train_batch_size": (("orchestrator.batch_size",), "the rollouts of a whole step, of all devices"),
    "gradient_accumulation_steps": (
        ("orchestrator.batch_size",),
        "the rollouts of a whole step; the trainer cuts it by `trainer.micro_batch_tokens`",
    ),
    "num_generations": (("orchestrator.rollouts_per_example",), ""),
    "max_completion_length": (("orchestrator.sampling.max_tokens",), ""),
    "max_prompt_length": (("seq_len",), "prompt and reply together"),
    "beta": (("trainer.loss.kl.coef",), "left out: no KL term"),
    "epsilon": (("trainer.loss.clip_low", "trainer.loss.clip_high"), "with `trainer.loss.type` = ppo"),
    "epsilon_high": (("trainer.loss.clip_high",), "with `trainer.loss.type` = ppo"),
    "learning_rate": (("trainer.optim.lr",), ""),
    "weight_decay": (("trainer.optim.weight_decay",), ""),
    "max_grad_norm": (("trainer.optim.max_norm",), ""),
    "lr_scheduler_type": (("trainer.scheduler.type",), ""),
    "warmup_ratio": (("trainer.scheduler.warmup_steps",), "in steps"),
    "warmup_steps": (("trainer.scheduler.warmup_steps",), ""),
    "num_train_epochs": (("max_steps",), "in steps: a run has no epochs"),
    "save_steps": (("ckpt.interval",), ""),
    "save_total_limit": (("ckpt.keep_last",), ""),
    "logging_steps": (("log.level",), "every step is logged and kept"),
    "loss_type": (("trainer.loss.type",), ""),
    "report_to": (("wandb.project",), "W&B; other tools read `millrace run export`"),
    "run_name": (("run.name",), ""),
})  # fmt: skip
"""By the name there: the keys here, and what they mean otherwise."""
_SFT: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType({
    "per_device_train_batch_size": (("data.batch_size",), "the samples of a whole step, of all devices"),
    "gradient_accumulation_steps": (("data.batch_size",), "the samples of a whole step"),
    "max_length": (("data.seq_len",), ""),
    "max_seq_length": (("data.seq_len",), ""),
    "packing": (("data.pack_function",), "cat packs, stack does not"),
    "dataset_name": (("data.name",), ""),
    "num_train_epochs": (("max_steps",), "in steps; one pass over the data if left out"),
})  # fmt: skip
SFT = MappingProxyType({
    **{name: (tuple(key.removeprefix("trainer.") for key in keys), text) for name, (keys, text) in RL.items()},
    **_SFT,
})  # fmt: skip


def is_trl(names: Mapping[str, object]) -> bool:
    """Return whether the keys at the top of a file are TRL's, which has no tables: at least two have names of TRL."""
    return len(names.keys() & (RL.keys() | _SFT.keys())) > 1


def meant(name: str, schema: SchemaKey, *, below: Path = ()) -> str | None:
    """Return the message about an unknown key whose name is TRL's, with the key that it is here; None for other names.

    `schema` is the root of the document. `below` is the section that has the key: if not empty, only its keys are
    named.
    """
    there = {dotted(key.path) for key in schema.walk()}
    table = RL if "orchestrator.batch_size" in there else SFT
    keys, text = table.get(name, ((), ""))
    known = [key for key in keys if key in there and (not below or key.rpartition(".")[0] == dotted(below))]
    if not known:
        return None
    ours, more = " and ".join(f"`{key}`" for key in known), f" ({text})" if text else ""
    return f"unknown key; did you mean {ours}{more}? That is what TRL's `{name}` is here"
