"""The config of `millrace sft`: supervised fine-tuning on prompts and completions, or on conversations."""

from collections.abc import Iterator
from typing import Literal

from millrace.config.section import BrokenRule, ConfigSection, Document, broken, option, required, table
from millrace.config.sections.data import DataSourceConfig, LossMaskConfig, Stopping
from millrace.config.sections.environments import PeriodicEvalEnvConfig, env_names
from millrace.config.sections.eval import FixedSamplingConfig
from millrace.config.sections.inference import InferenceConfig
from millrace.config.sections.loss import KlConfig, LossConfig
from millrace.config.sections.sampling import extra_body_rules
from millrace.config.sections.shared import DEFAULT_MODEL, CheckpointConfig, LogConfig, RunConfig, WandbConfig
from millrace.config.sections.trainer import (
    Dtype,
    LoraConfig,
    ModelLayoutConfig,
    OptimConfig,
    PackConfig,
    SchedulerConfig,
    TrainerConfig,
    TrainerModelConfig,
    broken_format_rules,
    broken_layout_rules,
    micro_batch_tokens,
    peak_tflops,
)
from millrace.config.tree import Facts


class SFTModelConfig(ModelLayoutConfig):
    """The model that is trained."""

    name: str = option(DEFAULT_MODEL, "Directory with a Hugging Face model, or Hub id.", min_length=1)
    dtype: Dtype = option("auto", "Format of forward and backward. auto: float32 on a CPU, bfloat16 on a GPU.")
    publish_dtype: Dtype = option("auto", "Format of the saved model. auto: as computed.")
    lora: LoraConfig | None = option(
        None,
        "Train adapters only, all weights if left out. `model` is saved with the adapters merged into it, and "
        "`adapter` beside it holds them alone, as PEFT has them.",
    )


class SFTDataConfig(DataSourceConfig):
    """The rows that are trained on."""

    stopping_strategy: Stopping = option(
        "all_exhausted",
        "A pass ends when the rows of all subsets or splits were taken (small ones repeat), or of one.",
    )
    loss_mask: LossMaskConfig = table(LossMaskConfig, "Messages of which roles are trained on.")
    batch_size: int = option(128, "Samples per step; with cat, rows of `seq_len` tokens.", ge=1)
    seq_len: int = option(
        128,
        "Longest sample in tokens; longer ones are cut. Scaled positions (longrope, dynamic) use it.",
        ge=2,
    )
    pack_function: Literal["stack", "cat"] = option(
        "stack",
        "stack: `batch_size` samples per step. cat: as many whole samples as fit into `batch_size` rows.",
    )
    shuffle: bool = option(True, "Draw rows in random order, anew in every pass.")
    seed: int = option(0, "Seed of the order.", facts=Facts(follows="seed", default_text="`seed`"), ge=0)


class SFTValDataConfig(DataSourceConfig):
    """The rows that every validation takes."""

    probabilities: list[float] | None = option(
        None,
        "As `data.probabilities`; each row counts once without this and `stopping_strategy`.",
    )
    stopping_strategy: Stopping | None = option(
        None,
        "As `data.stopping_strategy`; all_exhausted if only `probabilities` is written.",
    )
    loss_mask: LossMaskConfig | None = option(
        None, "Messages of which roles count.", facts=Facts(default_text="`data.loss_mask`")
    )
    seq_len: int = option(
        128,
        "Longest sample in tokens; longer ones are cut.",
        facts=Facts(follows="data.seq_len", default_text="`data.seq_len`"),
        ge=2,
    )
    seed: int = option(
        0,
        "Seed of the draws.",
        facts=Facts(
            follows="data.seed",
            default_text="`data.seed`",
            needs=("val.data.probabilities", "all rows are taken, and their order changes nothing"),
        ),
        ge=0,
    )

    @property
    def is_mixed(self) -> bool:
        """Return whether validation mixes its sources as training does; else each row counts once."""
        return self.probabilities is not None or self.stopping_strategy is not None


class SFTValConfig(ConfigSection):
    """The mean loss on held-out rows, as `val/loss`."""

    interval: int = option(50, "Steps between validations; the trained model always has one.", ge=1)
    eval_on_start: bool = option(False, "Also validate before the first step.")
    data: SFTValDataConfig = table(SFTValDataConfig, "The rows, all of which are taken each time.")


class SFTEvalConfig(ConfigSection):
    """Evaluations before the first step, every `interval` steps and at the end."""

    env: list[PeriodicEvalEnvConfig] = required("Environments to evaluate on (`[[eval.env]]`).", min_length=1)
    num_examples: int = option(-1, "Tasks per environment; -1: all held-out ones, or all.")
    rollouts_per_example: int = option(1, "Rollouts per task.", facts=Facts(aliases=("group_size",)), ge=1)
    interval: int = option(100, "Steps between evaluations.", ge=1)
    skip_first_step: bool = option(False, "No evaluation before the first step.")
    sampling: FixedSamplingConfig = table(FixedSamplingConfig, "How the model is sampled.")
    max_concurrent: int = option(64, "Rollouts played at once.", ge=1)
    rollout_timeout_s: float = option(600.0, "Seconds until an unfinished rollout fails.", gt=0)
    timeout_s: float = option(3600.0, "Seconds until an evaluation is given up with a warning.", gt=0)
    max_pending: int = option(
        2,
        "Evaluations that run or wait before training waits.",
        ge=1,
    )

    def due(self, step: int, *, is_last: bool) -> list[PeriodicEvalEnvConfig]:
        """Return the environments to evaluate after `step` (0: before the first step), by their intervals.

        After the last step (`is_last`) all environments are returned. Before the first step none is, if
        `skip_first_step` is set.
        """
        if step == 0 and self.skip_first_step and not is_last:
            return []
        return [env for env in self.env if is_last or step % (env.interval or self.interval) == 0]

    def broken_eval_rules(self) -> Iterator[BrokenRule]:
        """Yield the rules over several keys of `[eval]` that do not hold."""
        if self.num_examples == 0 or self.num_examples < -1:
            yield broken("must be -1 for all held-out tasks, or at least 1", "eval.num_examples")
        for index, env in enumerate(self.env):
            if env.num_examples == 0:
                message = "must be -1 for all held-out tasks, or at least 1; leave the environment out otherwise"
                yield BrokenRule(paths=(("eval", "env", index, "num_examples"),), message=message)
            yield from env.sampling.broken_rules(self.sampling, ("eval", "env", index, "sampling"))
        yield from extra_body_rules(self.sampling, "eval.sampling")
        yield from env_names(self.env, ("eval", "env"))


class DPOConfig(ConfigSection):
    """Direct Preference Optimization of pairs. The reference is the start model, without adapters."""

    beta: float = option(0.1, "Factor of the log-ratios to the reference.", gt=0)
    label_smoothing: float = option(
        0.0,
        "Share of pairs taken as mislabelled (conservative DPO).",
        ge=0,
        lt=0.5,
    )


class SFTConfig(Document):
    """A fine-tuning run, by the mean cross-entropy of the tokens of `data.loss_mask`, or by `[dpo]`."""

    model: SFTModelConfig = table(SFTModelConfig, "The model.")
    data: SFTDataConfig = table(SFTDataConfig, "The data.")
    dpo: DPOConfig | None = option(None, "Learn preference pairs (DPO); cross-entropy if left out.")
    val: SFTValConfig | None = option(None, "Validation; off if left out.")
    eval: SFTEvalConfig | None = option(None, "Evaluations; off if left out.")
    inference: InferenceConfig = table(InferenceConfig, "The engine of the evaluations.")
    inference_gpu_ids: list[int] | None = option(
        None,
        "GPUs of the engine of evaluations, as in `millrace rl`; training has the others.",
    )
    optim: OptimConfig = table(OptimConfig, "The optimizer.")
    scheduler: SchedulerConfig = table(SchedulerConfig, "Learning rate over the steps.")
    ckpt: CheckpointConfig | None = option(None, "Checkpoints; off if left out.")
    max_steps: int | None = option(None, "Optimizer steps; one pass over the data if left out.", ge=1)
    max_skipped_steps: int = option(3, "Steps in a row without a finite gradient, after which the command ends.", ge=1)
    micro_batch_tokens: int = micro_batch_tokens("data.seq_len", "data")
    pack: PackConfig = table(PackConfig, "Packing of samples into rows.")
    peak_tflops: float | None = peak_tflops()
    seed: int = option(0, "Seed of everything random.", ge=0)
    output_dir: str = option("outputs", "Directory of `<run name>/`.", min_length=1)
    run: RunConfig = table(RunConfig, "What the run is called.")
    log: LogConfig = table(LogConfig, "Logs.")
    wandb: WandbConfig | None = option(None, "Weights & Biases; off if left out.")

    def as_trainer(self) -> TrainerConfig:
        """Return the `[trainer]` section of an RL run whose steps take the same time and memory.

        With `[dpo]` that is one with the start model as a reference, and a micro-batch holds both responses of a pair.
        """
        shared = {name: getattr(self.model, name) for name in type(self.model).model_fields}
        model = TrainerModelConfig(**shared, seq_len=self.data.seq_len)
        same = ("optim", "scheduler", "max_steps", "micro_batch_tokens", "pack", "peak_tflops")
        values = {name: getattr(self, name) for name in same}
        if self.dpo is not None:
            values["loss"] = LossConfig(kl=KlConfig(coef=self.dpo.beta))
            values["micro_batch_tokens"] = max(self.micro_batch_tokens, 2 * self.data.seq_len)
        return TrainerConfig(model=model, **values)

    def remarks(self) -> list[BrokenRule]:
        """Return notes about a schedule that may be unintended."""
        return [*self.scheduler.remarks(self.max_steps), *super().remarks()]

    def broken_rules(self) -> list[BrokenRule]:
        """Return rules over several keys that do not hold."""
        return [
            *self.scheduler.broken_rules(self.optim, self.max_steps),
            *self._broken_data_rules(),
            *(() if self.eval is None else self.eval.broken_eval_rules()),
            *self.inference.broken_rules(),
            *self._broken_engine_rules(),
            *broken_layout_rules(self.model, self.optim),
            *broken_format_rules(self.model),
            *super().broken_rules(),
        ]

    def _broken_engine_rules(self) -> Iterator[BrokenRule]:
        """Yield a violation if the engine of evaluations is to sleep while the trainer trains: that engine has GPUs of
        its own.
        """
        if self.inference.sleep_while_training:
            yield broken("is for RL, whose trainer may share GPUs with vLLM", "inference.sleep_while_training")

    def _broken_data_rules(self) -> Iterator[BrokenRule]:
        """Yield the rules over several keys of `[data]` and `[val.data]` that do not hold."""
        data = self.data
        yield from data.broken_source_rules("data")
        if self.val is not None:
            yield from self.val.data.broken_source_rules("val.data")
        if self.dpo is not None:
            yield from self._broken_pair_rules()
        for key, mask in self._loss_masks().items():
            if not any(mask.model_dump().values()):
                yield broken("trains on no role; set one of its keys to true", key)

    def _broken_pair_rules(self) -> Iterator[BrokenRule]:
        """Yield violations of keys that have no meaning for preference pairs."""
        if self.data.pack_function == "cat":
            yield broken("counts tokens; a step of `[dpo]` takes `batch_size` pairs", "data.pack_function", "dpo")
        for key, mask in self._loss_masks().items():
            if mask != LossMaskConfig():
                yield broken("chooses roles; `[dpo]` compares what the assistant says in the responses", key, "dpo")
        tables = {"data": self.data.columns} | ({} if self.val is None else {"val.data": self.val.data.columns})
        for key, columns in tables.items():
            for name in ("messages", "completion"):
                if getattr(columns, name) != name:
                    message = "is not read of preference pairs, which have `prompt`, `chosen` and `rejected`"
                    yield broken(message, f"{key}.columns.{name}", "dpo")

    def _loss_masks(self) -> dict[str, LossMaskConfig]:
        """Return the tables that choose the trained roles, of training and of validation, by dotted path."""
        masks = {"data.loss_mask": self.data.loss_mask}
        if self.val is not None and self.val.data.loss_mask is not None:
            masks["val.data.loss_mask"] = self.val.data.loss_mask
        return masks
