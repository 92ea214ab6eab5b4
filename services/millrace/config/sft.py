"""The config of `millrace sft`: supervised fine-tuning on prompts and completions."""

from typing import Any

from pydantic import ValidationInfo, model_validator

from millrace.config.canonical import canonical_json
from millrace.config.rules import sft_rules
from millrace.config.rules_base import Finding, raise_for_rules
from millrace.config.section import Section, as_tree, option, table
from millrace.config.shared import DEFAULT_MODEL, CheckpointConfig, LogConfig, RunConfig, WandbConfig
from millrace.config.trainer import (
    DEFAULT_MICRO_BATCH_TOKENS,
    Dtype,
    OptimConfig,
    SchedulerConfig,
    micro_batch_default,
)


class SFTModelConfig(Section):
    """The model that is trained."""

    name: str = option(DEFAULT_MODEL, "Directory with a Hugging Face model, or a Hub id.", min_length=1)
    dtype: Dtype = option("auto", "Number format of forward and backward. auto: float32 on a CPU, bfloat16 on a GPU.")
    publish_dtype: Dtype = option("auto", "Number format of the saved model. auto: as computed.")


class SFTDataConfig(Section):
    """Prompts and completions. Each row has `prompt` and `completion`, both text or both lists of chat messages."""

    name: str = option(
        "PrimeIntellect/Reverse-Text-SFT",
        "A JSONL file, a directory of JSONL files, or the id of a dataset on the Hugging Face Hub.",
        min_length=1,
    )
    split: str = option("train", "Split of a Hub dataset; JSONL files have none.", min_length=1)
    batch_size: int = option(128, "Samples per optimizer step, at least 1.", ge=1)
    seq_len: int = option(128, "Longest sample in tokens, at least 2; a longer one is cut.", ge=2)
    shuffle: bool = option(True, "Draw the rows in a random order, a new one in every pass.")
    seed: int = option(0, "Seed of the order, at least 0.", default_text="`seed`", ge=0)


class SFTConfig(Section):
    """A supervised fine-tuning run. The loss counts completion tokens only."""

    model: SFTModelConfig = table(SFTModelConfig, "The model.")
    data: SFTDataConfig = table(SFTDataConfig, "The data.")
    optim: OptimConfig = table(OptimConfig, "The optimizer.")
    scheduler: SchedulerConfig = table(SchedulerConfig, "Learning rate over the steps.")
    ckpt: CheckpointConfig | None = option(None, "Checkpoints; off if left out.")
    max_steps: int | None = option(None, "Optimizer steps, at least 1; one pass over the data if left out.", ge=1)
    micro_batch_tokens: int = option(
        DEFAULT_MICRO_BATCH_TOKENS,
        "Tokens with padding that go through the model at once, at least `data.seq_len`.",
        default_text="8192, or `data.seq_len` if that is more",
        ge=1,
    )
    seed: int = option(0, "Seed of everything random, at least 0.", ge=0)
    output_dir: str = option("outputs", "Directory under which the run writes `<run name>/`.", min_length=1)
    run: RunConfig = table(RunConfig, "What the run is called.")
    log: LogConfig = table(LogConfig, "Logs.")
    wandb: WandbConfig | None = option(None, "Weights & Biases; off if left out.")

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: Any) -> Any:
        """Fill what depends on other keys: the data's seed and the room for one sample."""
        if not isinstance(data, dict):
            return data
        filled = as_tree(data)
        section = filled.get("data", {})
        filled.setdefault("micro_batch_tokens", micro_batch_default(section))
        if isinstance(section, dict) and "seed" in filled:
            filled["data"] = {"seed": filled["seed"], **section}
        return filled

    @model_validator(mode="after")
    def _cross_field_rules(self, info: ValidationInfo) -> "SFTConfig":
        """Refuse values that are right alone and wrong together."""
        raise_for_rules(self.broken_rules(), info)
        return self

    def broken_rules(self) -> list[Finding]:
        """Rules over several keys that do not hold."""
        return sft_rules(
            scheduler=self.scheduler,
            optim=self.optim,
            max_steps=self.max_steps,
            seq_len=self.data.seq_len,
            micro_batch_tokens=self.micro_batch_tokens,
        )

    def resolved_json(self) -> str:
        """The whole config with every default as one canonical JSON document; loading it gives the same config."""
        return canonical_json(self)
