"""One service's part of a run's config as a document of its own, as the split form has it."""

from millrace.config.rules import BrokenRule
from millrace.config.section import required, table
from millrace.config.sections.orchestrator import OrchestratorConfig
from millrace.config.sections.shared import SharedKeys
from millrace.config.sections.trainer import TrainerConfig


class TrainerPart(SharedKeys):
    """`trainer.toml`: the trainer's part of a run."""

    trainer: TrainerConfig = table(TrainerConfig, "The trainer.")

    def remarks(self) -> list[BrokenRule]:
        """What the schedule does that its user may not mean."""
        schedule = self.trainer.scheduler.remarks(self.trainer.max_steps, prefix="trainer.")
        return [*schedule, *super().remarks()]

    def broken_rules(self) -> list[BrokenRule]:
        """Rules over several keys that do not hold."""
        schedule = self.trainer.scheduler.broken_rules(self.trainer.optim, self.trainer.max_steps, prefix="trainer.")
        return [*schedule, *self.trainer.loss.broken_rules("trainer.loss"), *super().broken_rules()]


class OrchestratorPart(SharedKeys):
    """`orch.toml`: the orchestrator's part of a run."""

    orchestrator: OrchestratorConfig = required("The loop.")

    def broken_rules(self) -> list[BrokenRule]:
        """Rules over several keys that do not hold."""
        return [*self.orchestrator.broken_rules(), *super().broken_rules()]
