"""The config of `millrace sft`: supervised fine-tuning on prompts and completions."""

from millrace.config.rules import BrokenRule
from millrace.config.section import ConfigSection, Document, option, table
from millrace.config.sections.shared import DEFAULT_MODEL, CheckpointConfig, LogConfig, RunConfig, WandbConfig
from millrace.config.sections.trainer import Dtype, OptimConfig, SchedulerConfig, micro_batch_tokens
from millrace.config.tree import Facts


class SFTModelConfig(ConfigSection):
    """The model that is trained."""

    name: str = option(DEFAULT_MODEL, "Directory with a Hugging Face model, or a Hub id.", min_length=1)
    dtype: Dtype = option("auto", "Number format of forward and backward. auto: float32 on a CPU, bfloat16 on a GPU.")
    publish_dtype: Dtype = option("auto", "Number format of the saved model. auto: as computed.")


class SFTDataConfig(ConfigSection):
    """Prompts and completions. Each row has `prompt` and `completion`, both text or both lists of chat messages."""

    name: str = option(
        "PrimeIntellect/Reverse-Text-SFT",
        "A JSONL file, a directory of JSONL files, or the id of a dataset on the Hugging Face Hub.",
        min_length=1,
    )
    split: str = option("train", "Split of a Hub dataset; JSONL files have none.", min_length=1)
    batch_size: int = option(128, "Samples per optimizer step.", ge=1)
    seq_len: int = option(128, "Longest sample in tokens; a longer one is cut.", ge=2)
    shuffle: bool = option(True, "Draw the rows in a random order, a new one in every pass.")
    seed: int = option(0, "Seed of the order.", facts=Facts(follows="seed", default_text="`seed`"), ge=0)


class SFTConfig(Document):
    """A supervised fine-tuning run. The loss counts completion tokens only."""

    model: SFTModelConfig = table(SFTModelConfig, "The model.")
    data: SFTDataConfig = table(SFTDataConfig, "The data.")
    optim: OptimConfig = table(OptimConfig, "The optimizer.")
    scheduler: SchedulerConfig = table(SchedulerConfig, "Learning rate over the steps.")
    ckpt: CheckpointConfig | None = option(None, "Checkpoints; off if left out.")
    max_steps: int | None = option(None, "Optimizer steps; one pass over the data if left out.", ge=1)
    micro_batch_tokens: int = micro_batch_tokens("data.seq_len", "data")
    seed: int = option(0, "Seed of everything random.", ge=0)
    output_dir: str = option("outputs", "Directory under which the run writes `<run name>/`.", min_length=1)
    run: RunConfig = table(RunConfig, "What the run is called.")
    log: LogConfig = table(LogConfig, "Logs.")
    wandb: WandbConfig | None = option(None, "Weights & Biases; off if left out.")

    def broken_rules(self) -> list[BrokenRule]:
        """Rules over several keys that do not hold."""
        return [*self.scheduler.broken_rules(self.optim, self.max_steps), *super().broken_rules()]
