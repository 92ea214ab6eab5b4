"""What `--bench` asks of a service in isolation: a document that the command writes and the process reads."""

from typing import Literal

from millrace.config.section import ConfigSection, option, required, table
from millrace.config.sections.trainer import TrainerConfig

DEFAULT_STEPS = 5


class FakeDataConfig(ConfigSection):
    """Samples made up, without an environment or a data set: `--data.fake.KEY`."""

    type: Literal["fixed", "variable"] = option(
        "fixed", "fixed: every sample has `seq_len` tokens. variable: from a tenth of `seq_len` to all of it."
    )
    batch_size: int = option(2, "Samples per step.", ge=1)
    seq_len: int = option(2048, "Tokens of the longest sample.", ge=2)


class TrainerBench(ConfigSection):
    """Steps of a trainer on fake samples. The first one warms up, and is not counted."""

    trainer: TrainerConfig = required("The trainer.")
    data: FakeDataConfig = table(FakeDataConfig, "The samples.")
    steps: int = option(DEFAULT_STEPS, "Steps that are measured.", ge=1)
    seed: int = option(0, "Seed of the samples, and of everything else that is random.", ge=0)
    is_sft: bool = option(False, "Whether completions are imitated, as by SFT, instead of reinforced.")

    @property
    def context_length(self) -> int:
        """Tokens of the longest sequence."""
        return self.trainer.model.seq_len


class InferenceBench(ConfigSection):
    """Steps of the embedded engine: `max_num_seqs` sequences at once, of prompts and completions of equal lengths."""

    model: str = required("Directory of the model.")
    max_num_seqs: int = option(256, "Most sequences that are generated at the same time.", ge=1)
    prompt_tokens: int = option(128, "Tokens of a prompt.", ge=1)
    completion_tokens: int = option(128, "Tokens of a completion.", ge=1)
    steps: int = option(DEFAULT_STEPS, "Times that all sequences are generated.", ge=1)
