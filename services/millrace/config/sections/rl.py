"""The config of an RL run: what all parts share, one section per service, one service alone, and `--bench`."""

from collections.abc import Iterator
from typing import Any, Literal

from millrace.config.section import BrokenRule, ConfigSection, broken, option, required, table
from millrace.config.sections.environments import have_conversations
from millrace.config.sections.inference import CONSTRAINING_PARSERS, InferenceConfig
from millrace.config.sections.orchestrator import OrchestratorConfig
from millrace.config.sections.shared import PresetConfig, QueueConfig, RunConfig, SharedKeys
from millrace.config.sections.trainer import (
    TrainerConfig,
    broken_compile_rules,
    broken_format_rules,
    broken_layout_rules,
    broken_replay_rules,
)


class RLConfig(SharedKeys):
    """A reinforcement learning run."""

    inference_gpu_ids: list[int] | None = option(
        None,
        "GPUs of the engine: by default `parallel.tp` × `parallel.dp` for vLLM, none for the embedded one. "
        "`[]` hides all.",
    )
    trainer_gpu_ids: list[int] | None = option(
        None,
        "GPUs of the trainer, one rank each: by default those that the engine does not get. A single one is shared.",
    )
    algo: PresetConfig = table(PresetConfig, "An algorithm by one word.")
    run: RunConfig = table(RunConfig, "What the run is called.")
    queue: QueueConfig = table(QueueConfig, "When the run gets workers, and which.")
    trainer: TrainerConfig = table(TrainerConfig, "The trainer.")
    orchestrator: OrchestratorConfig = required("The loop.")
    inference: InferenceConfig = table(InferenceConfig, "The engine.")

    @property
    def context_length(self) -> int:
        """Return the longest sequence in tokens that the engine of the run's own stack serves."""
        return self.inference.context_length or self.orchestrator.seq_len

    def remarks(self) -> list[BrokenRule]:
        """Return notes about a schedule that may be unintended."""
        schedule = self.trainer.scheduler.remarks(self.trainer.max_steps, prefix="trainer.")
        return [*schedule, *super().remarks()]

    def broken_rules(self) -> list[BrokenRule]:
        """Return rules over several keys that do not hold."""
        return [
            *self.orchestrator.broken_rules(),
            *_trainer_rules(self.trainer),
            *self.inference.broken_rules(),
            *self._constrained_calls(),
            *self._too_many_minibatches(),
            *self._sleep_beside_sampling(),
            *self._unrecorded_experts(),
            *super().broken_rules(),
        ]

    def _constrained_calls(self) -> Iterator[BrokenRule]:
        """Yield a violation for a parser that constrains sampling, so that the trainer's log-probs would be others."""
        allowed = "orchestrator.sampling.allow_biased_sampling"
        if (
            self.inference.model.tool_call_parser in CONSTRAINING_PARSERS
            and not self.orchestrator.sampling.allow_biased_sampling
        ):
            yield broken(
                "makes vLLM force a call's form on what is sampled, which the trainer does not compute: that biases "
                f"what is learned; use another parser, or set `{allowed} = true`",
                "inference.model.tool_call_parser",
                allowed,
            )

    def _too_many_minibatches(self) -> Iterator[BrokenRule]:
        """Yield a violation if a batch has more minibatches than groups, because groups are not divided."""
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

    def _sleep_beside_sampling(self) -> Iterator[BrokenRule]:
        """Yield a violation if replicas are to sleep during a training step and to generate the next batch then."""
        level = self.orchestrator.async_level
        if self.inference.sleep_while_training and level > 0:
            yield broken(
                f"needs `async_level = 0`: with {level} replicas generate the next batch while one is trained; set it, "
                "or leave this out",
                "inference.sleep_while_training",
                "orchestrator.async_level",
            )

    def _unrecorded_experts(self) -> Iterator[BrokenRule]:
        """Yield a violation if the trainer is to replay experts that the engine does not record."""
        named = {name.replace("-", "_"): value for name, value in self.inference.vllm.items()}
        is_recorded = self.inference.return_routed_experts or named.get("enable_return_routed_experts") is True
        if self.trainer.model.moe.replay and not is_recorded:
            yield broken(
                "replays what the engine records: set `inference.return_routed_experts = true`, also for a stack that "
                "runs already, whose replicas need it, or leave this out",
                "trainer.model.moe.replay",
                "inference.return_routed_experts",
            )

    def with_model(self, name: str) -> "RLConfig":
        """Return a copy of the config with another model name for all services."""

        def renamed(section: Any) -> Any:
            """Return a copy of a section with the new name of the model."""
            return section.model_copy(update={"model": section.model.model_copy(update={"name": name})})

        services = {part: renamed(getattr(self, part)) for part in ("trainer", "orchestrator", "inference")}
        return renamed(self).model_copy(update=services)


def plays_conversations(config: RLConfig) -> bool:
    """Return whether a run needs the tokenizer's chat template, as far as its config says.

    It does not if vLLM gets another template, or if every environment has texts completed.
    """
    vllm = {name.replace("-", "_") for name in config.inference.vllm}
    if config.inference.model.chat_template or "chat_template" in vllm:
        return False
    return have_conversations(config.orchestrator.env)


def _trainer_rules(trainer: TrainerConfig) -> Iterator[BrokenRule]:
    """Yield rules over several keys of `[trainer]` that do not hold."""
    yield from trainer.scheduler.broken_rules(trainer.optim, trainer.max_steps, prefix="trainer.")
    yield from broken_layout_rules(trainer.model, trainer.optim, prefix="trainer.")
    yield from broken_compile_rules(trainer)
    yield from broken_format_rules(trainer.model, prefix="trainer.")
    yield from broken_replay_rules(trainer.model, prefix="trainer.")
    yield from trainer.loss.broken_rules("trainer.loss")
    if trainer.dataset is not None:
        yield from trainer.dataset.broken_rules("trainer.dataset")


# One service's part of a run's config as a document of its own, as the split form has it.


class TrainerPart(SharedKeys):
    """`trainer.toml`: the trainer's part of a run."""

    trainer: TrainerConfig = table(TrainerConfig, "The trainer.")

    def remarks(self) -> list[BrokenRule]:
        """Return notes about a schedule that may be unintended."""
        schedule = self.trainer.scheduler.remarks(self.trainer.max_steps, prefix="trainer.")
        return [*schedule, *super().remarks()]

    def broken_rules(self) -> list[BrokenRule]:
        """Return rules over several keys that do not hold."""
        return [*_trainer_rules(self.trainer), *super().broken_rules()]


class OrchestratorPart(SharedKeys):
    """`orch.toml`: the orchestrator's part of a run."""

    orchestrator: OrchestratorConfig = required("The loop.")

    def broken_rules(self) -> list[BrokenRule]:
        """Return rules over several keys that do not hold."""
        return [*self.orchestrator.broken_rules(), *super().broken_rules()]


# What `--bench` asks of a service in isolation: a document that the command writes and the process reads.

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
        """Return the longest sequence in tokens."""
        return self.trainer.model.seq_len


class InferenceBench(ConfigSection):
    """Steps of the embedded engine: `max_num_seqs` sequences at once, of prompts and completions of equal lengths."""

    model: str = required("Directory of the model.")
    max_num_seqs: int = option(256, "Most sequences that are generated at the same time.", ge=1)
    prompt_tokens: int = option(128, "Tokens of a prompt.", ge=1)
    completion_tokens: int = option(128, "Tokens of a completion.", ge=1)
    steps: int = option(DEFAULT_STEPS, "Times that all sequences are generated.", ge=1)
