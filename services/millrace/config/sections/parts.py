"""One service's part of a run's config as a document of its own, as the split form has it."""

from collections.abc import Iterator

from millrace.config.rules import BrokenRule
from millrace.config.section import Document, option, required, table
from millrace.config.sections.orchestrator import OrchestratorConfig
from millrace.config.sections.shared import CheckpointConfig, LogConfig, ModelConfig, WandbConfig
from millrace.config.sections.trainer import TrainerConfig
from millrace.config.tree import Facts


class _Part(Document):
    """What both have in common with a whole run."""

    model: ModelConfig = table(ModelConfig, "The model that is trained.")
    max_steps: int | None = option(None, "Optimizer steps; unlimited if left out.", ge=1)
    seq_len: int | None = option(None, "Longest sample in tokens.", facts=Facts(may_differ=True), ge=2)
    async_level: int = option(
        1, "Steps that sampling may run ahead of training.", facts=Facts(aliases=("max_async_level",)), ge=0
    )
    seed: int = option(0, "Seed of everything random.", ge=0)
    output_dir: str = option("outputs", "Directory under which the run writes `<run name>/`.", min_length=1)
    log: LogConfig = table(LogConfig, "Logs.")
    ckpt: CheckpointConfig | None = option(None, "Checkpoints; off if left out.")
    wandb: WandbConfig | None = option(None, "Weights & Biases; off if left out.")


class TrainerPart(_Part):
    """`trainer.toml`: the trainer's part of a run."""

    trainer: TrainerConfig = table(TrainerConfig, "The trainer.")

    def broken_rules(self) -> list[BrokenRule]:
        """Rules over several keys that do not hold."""
        schedule = self.trainer.scheduler.broken_rules(self.trainer.optim, self.trainer.max_steps, prefix="trainer.")
        return [*schedule, *super().broken_rules()]


class OrchestratorPart(_Part):
    """`orch.toml`: the orchestrator's part of a run."""

    orchestrator: OrchestratorConfig = required("The loop.")

    def broken_rules(self) -> list[BrokenRule]:
        """Rules over several keys that do not hold."""
        rules: Iterator[BrokenRule] = self.orchestrator.broken_rules()
        return [*rules, *super().broken_rules()]
