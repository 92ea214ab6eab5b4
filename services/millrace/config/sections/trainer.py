"""`[trainer]`: model precision, optimizer, schedule, loss, checkpoints."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from pydantic import field_validator

from millrace.config.section import BrokenRule, ConfigSection, broken, option, table
from millrace.config.sections.data import DatasetConfig
from millrace.config.sections.loss import LossConfig
from millrace.config.sections.shared import DEFAULT_MODEL, SHARED_MODEL, CheckpointConfig
from millrace.config.tree import Facts, Limit, OnlyFor

Dtype = Literal["auto", "float32", "bfloat16"]
DEFAULT_MICRO_BATCH_TOKENS = 8192
DEFAULT_RAMP_STEPS = 10
DEFAULT_SEQ_LEN = 2048
DEFAULT_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraConfig(ConfigSection):
    """Low-rank adapters on linear layers of a frozen base, instead of all weights."""

    rank: int = option(16, "Rank.", ge=1)
    alpha: float = option(32.0, "Adapters are scaled by `alpha / rank`.", gt=0)
    dropout: float = option(0.0, "Dropout on the adapters' input.", ge=0, lt=1)
    target_modules: list[str] = table(
        lambda: list(DEFAULT_LORA_TARGETS),
        "Layers with an adapter: names, dotted suffixes or regular expressions. Missing defaults are skipped.",
        facts=Facts(default_text=", ".join(f"`{name}`" for name in DEFAULT_LORA_TARGETS)),
    )
    modules_to_save: list[str] = table(
        list,
        "Layers trained whole and published with the adapters; vLLM cannot serve them.",
    )

    @field_validator("target_modules", "modules_to_save")
    @classmethod
    def _patterns(cls, patterns: list[str]) -> list[str]:
        """Return the patterns; raise ValueError if one is empty or no regular expression."""
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
            if not pattern:
                raise ValueError("must not contain an empty name")
        return patterns

    @field_validator("target_modules")
    @classmethod
    def _one_target(cls, patterns: list[str]) -> list[str]:
        """Return the patterns of adapted layers; raise ValueError if there is none."""
        if not patterns:
            raise ValueError("must name at least one layer; leave `target_modules` out for the usual ones")
        return patterns


class ActivationCheckpointConfig(ConfigSection):
    """Recompute activations in the backward: less memory, more time."""

    freq: int = option(1, "Every how many-th block.", ge=1)
    mode: Literal["full", "selective"] = option(
        "full",
        "full: keep a block's input only. selective: also results of matrix products and attention.",
    )


class CompileConfig(ConfigSection):
    """`torch.compile` of each block; such a run is best effort."""

    fullgraph: bool = option(
        False,
        "Run a block that is not one graph eagerly, with a warning. Not with `cp` or `ep`.",
    )


class ModelMemoryConfig(ConfigSection):
    """What the model's blocks keep and how they are computed."""

    ac: ActivationCheckpointConfig | None = option(None, "Activation checkpointing; off if left out.")
    compile: CompileConfig | None = option(
        None,
        "Compile the blocks: slow to start, faster to train. Needs a C++ compiler on a CPU, and Triton on a GPU; a "
        "block that does not compile runs eagerly, with a warning. Not with `tp`. Off if left out.",
    )
    reshard_after_forward: bool | None = option(
        None,
        "Free a block's gathered parameters between forward and backward. Default: true, except for one process in "
        "float32 without offload.",
    )
    fsdp_cpu_offload: bool = option(
        False,
        "Keep parameters, gradients and optimizer state in host memory.",
    )
    optim_cpu_offload: bool = option(
        False,
        "Keep the optimizer's state in host memory.",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = option("float32", "Format in which ranks sum gradients.")
    optimization_dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        "Format of stepped weights, gradients and optimizer state. bfloat16 loses steps below 1/256 of a weight. Not "
        "with `lora`.",
    )


class ModelLayoutConfig(ModelMemoryConfig):
    """How the ranks of a gang share the model: dp_replicate × dp_shard × cp × tp, where dp_shard is what is left."""

    dp_replicate: int = option(
        1,
        "Copies of the sharded parameters (HSDP), for machines with a slow network between them.",
        ge=1,
    )
    tp: int = option(
        1,
        "Tensor parallel ranks (docs/planning.md). Not with `lora` or `dropout`.",
        ge=1,
    )
    cp: int = option(
        1,
        "Context parallel ranks, for long samples (docs/planning.md).",
        ge=1,
    )
    ep: int = option(
        1,
        "Expert parallel ranks (docs/planning.md).",
        ge=1,
    )


class MoeConfig(ConfigSection):
    """Mixtures of experts."""

    replay: bool = option(
        False,
        "Send tokens to the experts that the engine recorded (docs/algorithms.md). Not with `compile`, `tp`, "
        "`cp` or `ep`.",
    )


class TrainerModelConfig(ModelLayoutConfig):
    """The trainer's copy of the model."""

    name: str = option(DEFAULT_MODEL, "Directory or Hub id.", facts=SHARED_MODEL, min_length=1)
    seq_len: int = option(
        DEFAULT_SEQ_LEN,
        "Longest sample in tokens.",
        facts=Facts(
            shared="seq_len",
            limit=Limit(
                "at least",
                "orchestrator.seq_len",
                ": the trainer has to take every rollout; set `seq_len` at the top for both",
            ),
        ),
        ge=2,
    )
    dtype: Dtype = option(
        "auto",
        "Format of forward and backward. auto: float32 on a CPU, bfloat16 on a GPU.",
    )
    publish_dtype: Dtype = option("auto", "Format of published policies. auto: as computed.")
    dropout: bool = option(
        False,
        "Use the dropout of config.json in training; log-probs then differ from the engine's.",
    )
    lora: LoraConfig | None = option(None, "Train adapters only; all weights if left out.")
    moe: MoeConfig = table(MoeConfig, "Mixtures of experts.")


class TokenizerConfig(ConfigSection):
    """The tokenizer of the published policy."""

    name: str | None = option(None, "Directory or Hub id; the model's if left out.", min_length=1)


_WITH_DELTAS = Facts(
    only_for=OnlyFor(".delta", (True,), "means nothing with `delta = false`: every version is whole; leave it out")
)


class PolicyConfig(ConfigSection):
    """How versions of the policy are stored; LoRA adapters are always whole."""

    delta: bool = option(
        True,
        "Store versions as differences where these are smaller. Takes a copy of the weights in the memory of "
        "trainer and replicas.",
    )
    anchor_interval: int = option(
        20,
        "Versions from one full copy to the next.",
        facts=_WITH_DELTAS,
        ge=1,
        le=256,
    )
    skip_deltas: list[int] = table(
        lambda: [4, 16],
        "Also store differences from so many versions before, for replicas that fell behind; each takes up to a copy "
        "in memory.",
        facts=_WITH_DELTAS,
    )

    @field_validator("skip_deltas")
    @classmethod
    def _skips_are_distinct(cls, value: list[int]) -> list[int]:
        """Return the lengths of skip deltas; raise ValueError if one is not from 2 to 256, or occurs twice."""
        if len(set(value)) != len(value) or any(not 2 <= number <= 256 for number in value):
            raise ValueError(f"must be different numbers from 2 to 256, not {value}")
        return value


class OptimConfig(ConfigSection):
    """The optimizer."""

    type: Literal["adamw", "muon", "sgd"] = option(
        "adamw",
        "muon: torch's Muon for matrices of hidden layers, AdamW for the rest. sgd: with momentum.",
    )
    lr: float = option(1e-6, "Peak learning rate.", ge=0)
    weight_decay: float = option(0.01, "Decoupled weight decay; of sgd, part of the gradient.", ge=0)
    max_norm: float = option(1.0, "Gradients are scaled down to this norm.", gt=0)
    betas1: float = option(
        0.9, "Decay of AdamW's first moment.", facts=Facts(only_for=OnlyFor(".type", ("adamw", "muon"))), ge=0, lt=1
    )
    betas2: float = option(
        0.999, "Decay of AdamW's second moment.", facts=Facts(only_for=OnlyFor(".type", ("adamw", "muon"))), ge=0, lt=1
    )
    mu: float = option(0.95, "Momentum of Muon.", facts=Facts(only_for=OnlyFor(".type", ("muon",))), gt=0, lt=1)
    momentum: float = option(0.9, "Momentum of sgd.", facts=Facts(only_for=OnlyFor(".type", ("sgd",))), ge=0, lt=1)
    state_dtype: Literal["auto", "bfloat16"] = option(
        "auto",
        "Format of the state. auto: as the stepped weights. bfloat16: half of float32's memory, "
        "slower, with stochastic rounding.",
    )
    nesterov: bool = option(True, "Nesterov momentum of sgd.", facts=Facts(only_for=OnlyFor(".type", ("sgd",))))


def broken_layout_rules(model: ModelLayoutConfig, optim: OptimConfig, *, prefix: str = "") -> Iterator[BrokenRule]:
    """Yield violations of what does not go with tensor, context or expert parallelism.

    That is compiled blocks, adapters and dropout. `prefix` is the table that has `model`, with a dot, or empty.
    """
    key = f"{prefix}model.tp"
    if model.compile is not None and model.tp > 1:
        why = "must be left out with tp above 1, whose exchanges are not proved in compiled blocks"
        yield broken(why, f"{prefix}model.compile", key)
    exchanging = [name for name in ("cp", "ep") if getattr(model, name) > 1]
    if model.compile is not None and model.compile.fullgraph and exchanging:
        why = f"must be false with {' and '.join(exchanging)} above 1: the exchanges of ranks divide a block's graph"
        yield broken(why, f"{prefix}model.compile.fullgraph", *(f"{prefix}model.{name}" for name in exchanging))
    if model.tp > 1 and getattr(model, "lora", None) is not None:
        yield broken("must be 1 with adapters, which are not cut; leave it out", key, f"{prefix}model.lora")
    if model.tp > 1 and getattr(model, "dropout", False):
        yield broken("must be 1 with dropout, which every rank would draw alike", key, f"{prefix}model.dropout")


def broken_format_rules(model: ModelMemoryConfig, *, prefix: str = "") -> Iterator[BrokenRule]:
    """Yield violations if `optimization_dtype` is bfloat16 beside float32 computation or adapters.

    `prefix` is the table that has `model`, with a dot, or empty.
    """
    key = f"{prefix}model.optimization_dtype"
    if model.optimization_dtype == "float32":
        return
    if getattr(model, "dtype", "auto") == "float32":
        yield broken("must be float32 where float32 is computed in; leave one of both out", key, f"{prefix}model.dtype")
    if getattr(model, "lora", None) is not None:
        yield broken("must be float32 with adapters, which are small; leave it out", key, f"{prefix}model.lora")


def broken_compile_rules(trainer: "TrainerConfig") -> Iterator[BrokenRule]:
    """Yield a violation if determinism is strict with compiled blocks."""
    if trainer.model.compile is not None and trainer.determinism == "strict":
        yield broken(
            "must not be strict with compiled blocks: kernels depend on which shapes came first and on whether the "
            "compiler worked, and another start may have other bits; leave it out, or `trainer.model.compile`",
            "trainer.determinism",
            "trainer.model.compile",
        )


def broken_replay_rules(model: TrainerModelConfig, *, prefix: str = "") -> Iterator[BrokenRule]:
    """Yield violations of what replayed experts are not proved with: compiled blocks, and ranks that share layers or
    rows.

    `prefix` is the table that has `model`, with a dot, or empty.
    """
    if not model.moe.replay:
        return
    key = f"{prefix}model.moe.replay"
    if model.compile is not None:
        why = "must be false with compiled blocks, whose routers choose inside of a graph; leave one of both out"
        yield broken(why, key, f"{prefix}model.compile")
    for name in ("tp", "cp", "ep"):
        if getattr(model, name) > 1:
            why = (
                f"must be false with {name} above 1, with which replayed experts are not proved; leave one of both out"
            )
            yield broken(why, key, f"{prefix}model.{name}")


def _ramp(*types: str) -> Callable[[Mapping[str, Any]], int]:
    """Return a function that makes the default length of a ramp, in steps, from a scheduler's table.

    It returns 0 for schedules of all types but `types`.
    """
    return lambda schedule: DEFAULT_RAMP_STEPS if schedule.get("type", "constant") in types else 0


class SchedulerConfig(ConfigSection):
    """Learning rate over the steps."""

    type: Literal["constant", "linear", "cosine"] = option(
        "constant",
        "constant: warm-up, then flat. linear: at the end straight down to `min_lr`. cosine: half a cosine "
        "down to `min_lr`.",
    )
    warmup_steps: int = option(
        0,
        "Steps from 0 to the peak.",
        facts=Facts(default_text="10 for linear and cosine, 0 for constant", default_from=_ramp("linear", "cosine")),
        ge=0,
    )
    decay_steps: int = option(
        0,
        "linear: steps of the decay.",
        facts=Facts(
            default_text="10 for linear, 0 for the others",
            default_from=_ramp("linear"),
            only_for=OnlyFor(".type", ("linear",)),
        ),
        ge=0,
    )
    min_lr: float = option(
        0.0,
        "Rate at the end of the decay.",
        facts=Facts(only_for=OnlyFor(".type", ("linear", "cosine"))),
        ge=0,
    )

    def remarks(self, max_steps: int | None, *, prefix: str = "") -> Iterator[BrokenRule]:
        """Yield a note if all of `max_steps` are warm-up, so that the peak is never reached.

        `prefix` is the table that has `scheduler`, with a dot, or empty.
        """
        if max_steps and self.warmup_steps >= max_steps:
            yield broken(
                f"all of the {max_steps} steps are warm-up, and none has the peak; `max_steps` is at most "
                f"`warmup_steps`, which is {self.warmup_steps}",
                f"{prefix}scheduler.warmup_steps",
                f"{prefix}max_steps",
            )

    def broken_rules(self, optim: OptimConfig, max_steps: int | None, *, prefix: str = "") -> Iterator[BrokenRule]:
        """Yield violations of a schedule that does not fit into the run, or whose end is above its peak.

        `max_steps` None means that the run has no end. `prefix` is the table that has `scheduler`, with a dot, or
        empty.
        """
        key = f"{prefix}scheduler"
        if self.type != "constant" and max_steps is None:
            yield broken(
                f"{self.type} needs `max_steps` to know where to end; set `max_steps`, or use constant",
                f"{key}.type",
                f"{prefix}max_steps",
            )
        ramps = self.warmup_steps + self.decay_steps
        if self.type != "constant" and max_steps is not None and ramps > max_steps:
            yield broken(
                f"warm-up ({self.warmup_steps}) and decay ({self.decay_steps}) take {ramps} steps, more than "
                f"`max_steps`, which is {max_steps}; shorten them",
                f"{key}.warmup_steps",
                f"{key}.decay_steps",
                f"{prefix}max_steps",
            )
        if self.type == "linear" and self.decay_steps < 1:
            yield broken(
                "must be at least 1 for linear; for no decay use constant", f"{key}.decay_steps", f"{key}.type"
            )
        if self.type != "constant" and self.min_lr > optim.lr:
            message = f"must be at most the peak `{prefix}optim.lr`, which is {optim.lr}"
            yield broken(message, f"{key}.min_lr", f"{prefix}optim.lr")


def peak_tflops() -> Any:
    """Return the pydantic field of the key `peak_tflops`."""
    return option(
        None,
        "TFLOP/s of one device, for `perf/mfu`; by default of known GPUs in bfloat16.",
        gt=0,
    )


def micro_batch_tokens(key: str, section: str) -> Any:
    """Return the pydantic field of the key `micro_batch_tokens`, which has to hold one whole sample.

    `key` is the dotted key with the longest sample: `seq_len` of the table `section` beside this key.
    """

    def default(table: Mapping[str, Any]) -> int:
        """Return the default, or the length of the longest sample in `table` if that is more."""
        inner = table.get(section)
        seq_len = inner.get("seq_len") if isinstance(inner, dict) else getattr(inner, "seq_len", None)
        return max(DEFAULT_MICRO_BATCH_TOKENS, seq_len) if isinstance(seq_len, int) else DEFAULT_MICRO_BATCH_TOKENS

    return option(
        DEFAULT_MICRO_BATCH_TOKENS,
        "Tokens with padding that go through the model at once.",
        facts=Facts(
            default_text=f"{DEFAULT_MICRO_BATCH_TOKENS}, or `{key}` if that is more",
            default_from=default,
            limit=Limit("at least", key, ": it has to hold one whole sample; raise it"),
        ),
        ge=1,
    )


class PackConfig(ConfigSection):
    """Rows of several samples that do not attend to each other."""

    mode: Literal["auto", "always", "never"] = option(
        "auto",
        "always: rows as long as the longest sample or, on a GPU with a kernel for it, the micro-batch. "
        "never: one sample per row. auto: the cheaper one.",
    )
    causal_cost: float = option(2.0, "Cost of attention where a row is one sample.", gt=0)
    masked_cost: float = option(3.2, "Cost where a mask separates samples.", gt=0)


class TokenLogConfig(ConfigSection):
    """The trainer's log-probs, which the dashboard compares with the engine's."""

    share: float = option(
        0.1,
        "Share of rollouts whose tokens are stored, with 6 bytes each.",
        ge=0,
        le=1,
    )


class TrainerConfig(ConfigSection):
    """The trainer of an RL run."""

    model: TrainerModelConfig = table(TrainerModelConfig, "The model.")
    tokenizer: TokenizerConfig = table(TokenizerConfig, "The tokenizer.")
    optim: OptimConfig = table(OptimConfig, "The optimizer.")
    scheduler: SchedulerConfig = table(SchedulerConfig, "Learning rate over the steps.")
    loss: LossConfig = table(LossConfig, "The loss.")
    dataset: DatasetConfig | None = option(None, "Rows of a dataset that every step learns, too; none if left out.")
    policy: PolicyConfig = table(PolicyConfig, "Published versions of the policy.")
    ckpt: CheckpointConfig | None = option(None, "Checkpoints; off if left out.", facts=Facts(shared="ckpt"))
    max_steps: int | None = option(
        None, "Optimizer steps; unlimited if left out.", facts=Facts(shared="max_steps"), ge=1
    )
    max_skipped_steps: int = option(
        3,
        "Steps in a row without finite loss, entropy or gradient, after which the run fails.",
        ge=1,
    )
    minibatches: int = option(
        1,
        "Optimizer steps per batch, each on a part of its groups.",
        ge=1,
    )
    determinism: Literal["auto", "strict", "best_effort"] = option(
        "auto",
        "strict: a replayed step must give the same bits, or the run stops. best_effort: it may start a new "
        "lineage. auto: strict on a CPU without `model.compile`, else best_effort.",
    )
    micro_batch_tokens: int = micro_batch_tokens("trainer.model.seq_len", "model")
    pack: PackConfig = table(PackConfig, "Packing of samples into rows.")
    token_log: TokenLogConfig = table(TokenLogConfig, "The trainer's log-probs, stored for the dashboard.")
    peak_tflops: float | None = peak_tflops()
