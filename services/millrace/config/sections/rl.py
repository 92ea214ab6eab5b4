"""The config of an RL run: what all parts share, and one section per service."""

from typing import Any

from millrace.config.rules import BrokenRule
from millrace.config.section import Document, option, required, table
from millrace.config.sections.inference import InferenceConfig
from millrace.config.sections.orchestrator import OrchestratorConfig
from millrace.config.sections.shared import CheckpointConfig, LogConfig, ModelConfig, RunConfig, WandbConfig
from millrace.config.sections.trainer import TrainerConfig
from millrace.config.tree import Facts


class RLConfig(Document):
    """A reinforcement learning run.

    The keys `model.name`, `max_steps`, `seq_len`, `seed`, `async_level` and `ckpt` at the top are shared: each fills
    the services' keys of the same meaning, and is filled from them where only those are written.
    """

    model: ModelConfig = table(ModelConfig, "The model that is trained.")
    max_steps: int | None = option(None, "Optimizer steps; unlimited if left out.", ge=1)
    seq_len: int | None = option(
        None, "Longest sample in tokens; none if those of the services differ.", facts=Facts(may_differ=True), ge=2
    )
    async_level: int = option(
        1, "Steps that sampling may run ahead of training.", facts=Facts(aliases=("max_async_level",)), ge=0
    )
    seed: int = option(0, "Seed of the task order and of the trainer; sampled tokens are not seeded.", ge=0)
    inference_gpu_ids: list[int] | None = option(
        None, "GPUs that the engine sees in the stack of `millrace rl`; all if left out. `[]` hides them."
    )
    trainer_gpu_ids: list[int] | None = option(
        None, "GPUs that the trainer sees in the stack of `millrace rl`; all if left out. Its process uses the first."
    )
    output_dir: str = option("outputs", "Directory under which the run writes `<run name>/`.", min_length=1)
    run: RunConfig = table(RunConfig, "What the run is called.")
    log: LogConfig = table(LogConfig, "Logs.")
    ckpt: CheckpointConfig | None = option(None, "Checkpoints; off if left out.")
    wandb: WandbConfig | None = option(None, "Weights & Biases; off if left out.")
    trainer: TrainerConfig = table(TrainerConfig, "The trainer.")
    orchestrator: OrchestratorConfig = required("The loop.")
    inference: InferenceConfig = table(InferenceConfig, "The engine.")

    def broken_rules(self) -> list[BrokenRule]:
        """Rules over several keys that do not hold."""
        schedule = self.trainer.scheduler.broken_rules(self.trainer.optim, self.trainer.max_steps, prefix="trainer.")
        return [*self.orchestrator.broken_rules(), *schedule, *super().broken_rules()]

    def with_model(self, name: str) -> "RLConfig":
        """The same run with another model, such as the absolute path of a relative one; all services' names change."""

        def renamed(section: Any) -> Any:
            return section.model_copy(update={"model": section.model.model_copy(update={"name": name})})

        services = {part: renamed(getattr(self, part)) for part in ("trainer", "orchestrator", "inference")}
        return renamed(self).model_copy(update=services)
