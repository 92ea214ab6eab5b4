"""The config of an RL run: what all parts share, and one section per service."""

from typing import Any

from pydantic import ValidationInfo, model_validator

from millrace.config.canonical import canonical_json
from millrace.config.inference import InferenceConfig
from millrace.config.orchestrator import OrchestratorConfig
from millrace.config.rules import rl_rules
from millrace.config.rules_base import Finding, raise_for_rules
from millrace.config.section import Section, option, required, table
from millrace.config.shared import CheckpointConfig, LogConfig, ModelConfig, RunConfig, WandbConfig
from millrace.config.sharing import fill_shared
from millrace.config.trainer import TrainerConfig


class RLConfig(Section):
    """A reinforcement learning run.

    The keys `model.name`, `max_steps`, `seq_len`, `seed`, `async_level` and `ckpt` at the top are shared: each fills
    the services' keys of the same meaning, and is filled from them where only those are written.
    """

    model: ModelConfig = table(ModelConfig, "The model that is trained. Fills `model.name` of every service.")
    max_steps: int | None = option(
        None,
        "Optimizer steps, at least 1; unlimited if left out. Fills `trainer.max_steps` and `orchestrator.max_steps`.",
        ge=1,
    )
    seq_len: int | None = option(
        None,
        "Longest sample in tokens, at least 2. Fills `trainer.model.seq_len` and `orchestrator.seq_len`; none if those "
        "differ.",
        ge=2,
    )
    async_level: int = option(
        1,
        "Steps that sampling may run ahead of training, at least 0. Fills `orchestrator.async_level`.",
        aliases=("max_async_level",),
        ge=0,
    )
    seed: int = option(
        0,
        "Seed of the task order and of the trainer, at least 0; sampled tokens are not seeded. Fills "
        "`orchestrator.seed`.",
        ge=0,
    )
    output_dir: str = option("outputs", "Directory under which the run writes `<run name>/`.", min_length=1)
    run: RunConfig = table(RunConfig, "What the run is called.")
    log: LogConfig = table(LogConfig, "Logs.")
    ckpt: CheckpointConfig | None = option(None, "Checkpoints; off if left out. Fills `trainer.ckpt`.")
    wandb: WandbConfig | None = option(None, "Weights & Biases; off if left out.")
    trainer: TrainerConfig = table(TrainerConfig, "The trainer.")
    orchestrator: OrchestratorConfig = required("The loop.")
    inference: InferenceConfig = table(InferenceConfig, "The engine.")

    @model_validator(mode="before")
    @classmethod
    def _share(cls, data: Any) -> Any:
        """Fill shared keys into the services' sections and back."""
        if not isinstance(data, dict):
            return data
        filled, conflicts = fill_shared(data)
        if conflicts:
            raise ValueError("; ".join(conflict.describe() for conflict in conflicts))
        return filled

    @model_validator(mode="after")
    def _cross_field_rules(self, info: ValidationInfo) -> "RLConfig":
        """Refuse values that are right alone and wrong together."""
        raise_for_rules(self.broken_rules(), info)
        return self

    def broken_rules(self) -> list[Finding]:
        """Rules over several keys that do not hold."""
        return rl_rules(trainer=self.trainer, orchestrator=self.orchestrator, inference=self.inference)

    def with_model(self, name: str) -> "RLConfig":
        """The same run with another model, such as the absolute path of a relative one; all services' names change."""
        tree = self.model_dump()
        for section in (tree, tree["trainer"], tree["orchestrator"], tree["inference"]):
            section["model"]["name"] = name
        return RLConfig.model_validate(tree)

    def resolved_json(self) -> str:
        """The whole config with every default as one canonical JSON document; loading it gives the same config."""
        return canonical_json(self)
