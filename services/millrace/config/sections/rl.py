"""The config of an RL run: what all parts share, and one section per service."""

from collections.abc import Iterator
from typing import Any

from millrace.config.rules import BrokenRule, broken
from millrace.config.section import option, required, table
from millrace.config.sections.inference import InferenceConfig
from millrace.config.sections.orchestrator import OrchestratorConfig
from millrace.config.sections.shared import PresetConfig, RunConfig, SharedKeys
from millrace.config.sections.trainer import TrainerConfig


class RLConfig(SharedKeys):
    """A reinforcement learning run.

    The keys `model.name`, `max_steps`, `seq_len`, `seed`, `async_level` and `ckpt` at the top are shared: each fills
    the services' keys of the same meaning, and is filled from them where only those are written.
    """

    inference_gpu_ids: list[int] | None = option(
        None, "GPUs that the engine sees in the stack of `millrace rl`; all if left out. `[]` hides them."
    )
    trainer_gpu_ids: list[int] | None = option(
        None, "GPUs that the trainer sees in the stack of `millrace rl`; all if left out. Its process uses the first."
    )
    algo: PresetConfig = table(PresetConfig, "An algorithm by one word.")
    run: RunConfig = table(RunConfig, "What the run is called.")
    trainer: TrainerConfig = table(TrainerConfig, "The trainer.")
    orchestrator: OrchestratorConfig = required("The loop.")
    inference: InferenceConfig = table(InferenceConfig, "The engine.")

    def broken_rules(self) -> list[BrokenRule]:
        """Rules over several keys that do not hold."""
        schedule = self.trainer.scheduler.broken_rules(self.trainer.optim, self.trainer.max_steps, prefix="trainer.")
        return [
            *self.orchestrator.broken_rules(),
            *schedule,
            *self.trainer.loss.broken_rules("trainer.loss"),
            *self._too_many_minibatches(),
            *super().broken_rules(),
        ]

    def _too_many_minibatches(self) -> Iterator[BrokenRule]:
        """More parts of a batch than it has groups, which stay whole: their advantages compare their rollouts."""
        groups, minibatches = self.orchestrator.groups_per_step, self.trainer.minibatches
        if minibatches > max(groups, 1):
            size, group = "orchestrator.batch_size", "orchestrator.rollouts_per_example"
            yield broken(
                f"must be at most the groups of a batch, which are {groups} (`{size}` / `{group}`): every optimizer "
                "step learns from whole groups; lower it, or raise the batch size",
                "trainer.minibatches",
                size,
                group,
            )

    def with_model(self, name: str) -> "RLConfig":
        """The same run with another model, such as the absolute path of a relative one; all services' names change."""

        def renamed(section: Any) -> Any:
            return section.model_copy(update={"model": section.model.model_copy(update={"name": name})})

        services = {part: renamed(getattr(self, part)) for part in ("trainer", "orchestrator", "inference")}
        return renamed(self).model_copy(update=services)
