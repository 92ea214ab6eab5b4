"""`[inference]`: the engine that serves the policy."""

from collections.abc import Iterator
from typing import Literal

from pydantic import ValidationInfo, model_validator

from millrace.config.rules_base import Finding, raise_for_rules
from millrace.config.section import FreeTable, Section, option, table
from millrace.config.shared import DEFAULT_MODEL, LogConfig

DEFAULT_MAX_NUM_SEQS = 256


class InferenceModelConfig(Section):
    """The engine's copy of the model."""

    name: str = option(
        DEFAULT_MODEL,
        "`millrace rl`: has to be equal to `model.name`, since the engine serves what the trainer publishes. `millrace "
        "inference`: the directory or Hub id to serve from the start. Shared: `model.name`.",
        min_length=1,
    )
    max_model_len: int | None = option(
        None,
        "Longest sequence in tokens that the engine serves, at least `orchestrator.seq_len`.",
        default_text="`orchestrator.seq_len`; the model's own in `millrace inference`",
        ge=2,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Number format that vLLM computes in. auto is that of the policy; another one than the policy's is refused, "
        "because what the engine holds could not be proved.",
    )
    enforce_eager: bool = option(False, "vLLM: no compilation and no CUDA graphs; starts sooner, generates slower.")
    trust_remote_code: bool = option(False, "vLLM: run code that comes with the model.")
    chat_template: str | None = option(None, "vLLM: file of a chat template instead of the tokenizer's.", min_length=1)
    tool_call_parser: str | None = option(
        None, "vLLM: parser of tool calls, such as hermes; switches automatic tool choice on.", min_length=1
    )
    reasoning_parser: str | None = option(None, "vLLM: parser of reasoning, such as qwen3.", min_length=1)


class ParallelConfig(Section):
    """vLLM: the devices of one replica."""

    tp: int = option(1, "Tensor parallel ranks, at least 1.", ge=1)
    dp: int = option(1, "Data parallel ranks, at least 1.", ge=1)


class ServerConfig(Section):
    """Where the engine listens for HTTP."""

    host: str = option("127.0.0.1", "Address to listen on.", min_length=1)
    port: int | None = option(
        None, "Port, 1 to 65535. A free one is picked if left out: engines are found by registration.", ge=1, le=65535
    )


class InferenceConfig(Section):
    """The engine of the stack that `millrace rl` starts for the run, and the replica of `millrace inference`.

    A stack that runs already (`--server`, `millrace up`) keeps its own settings: MILLRACE_ENGINE, MILLRACE_VLLM_FLAGS,
    MILLRACE_MAX_NUM_SEQS, MILLRACE_MAX_MODEL_LEN and MILLRACE_HTTP_LISTEN of its inference process.
    """

    engine: Literal["embedded", "vllm"] = option(
        "embedded",
        "Which engine. embedded is transformers-based, for laptops and tests; vllm is vLLM 0.32, from the Python "
        "environment that MILLRACE_VLLM_PYTHON names.",
    )
    model: InferenceModelConfig = table(InferenceModelConfig, "The model.")
    parallel: ParallelConfig = table(ParallelConfig, "vLLM: the devices of one replica.")
    server: ServerConfig = table(ServerConfig, "Where it listens.")
    max_num_seqs: int = option(
        DEFAULT_MAX_NUM_SEQS, "Most sequences that one engine generates at the same time, at least 1.", ge=1
    )
    gpu_memory_utilization: float | None = option(
        None, "vLLM: part of the GPU's memory that it takes, above 0, at most 1.", default_text="vLLM's", gt=0, le=1
    )
    vllm: FreeTable = table(
        dict,
        "Any other flag of `vllm serve`, with the name that it has there (`enable_prefix_caching = true`). vLLM's own "
        "parser checks them before it starts.",
    )


class ReplicaConfig(Section):
    """One replica in the foreground: `millrace inference @ infer.toml`.

    The file is either the `[inference]` section itself, as in the split form, or has it under that name.
    """

    inference: InferenceConfig = table(InferenceConfig, "The engine.")
    log: LogConfig = table(LogConfig, "Logs.")

    @model_validator(mode="after")
    def _rules(self, info: ValidationInfo) -> "ReplicaConfig":
        raise_for_rules(self.broken_rules(), info)
        return self

    def broken_rules(self) -> list[Finding]:
        """Rules over several keys that do not hold."""
        return list(engine_rules(self.inference))


def engine_rules(config: InferenceConfig) -> Iterator[Finding]:
    """Keys that mean nothing to the engine that is chosen."""
    if config.engine == "vllm":
        return
    given = {
        ("inference", "vllm"): bool(config.vllm),
        ("inference", "gpu_memory_utilization"): config.gpu_memory_utilization is not None,
        ("inference", "parallel", "tp"): config.parallel.tp > 1,
        ("inference", "parallel", "dp"): config.parallel.dp > 1,
        ("inference", "model", "dtype"): config.model.dtype != "auto",
        ("inference", "model", "enforce_eager"): config.model.enforce_eager,
        ("inference", "model", "trust_remote_code"): config.model.trust_remote_code,
        ("inference", "model", "chat_template"): config.model.chat_template is not None,
        ("inference", "model", "tool_call_parser"): config.model.tool_call_parser is not None,
        ("inference", "model", "reasoning_parser"): config.model.reasoning_parser is not None,
    }
    for path, is_given in given.items():
        if is_given:
            yield Finding(
                paths=(path, ("inference", "engine")),
                message='means nothing to the embedded engine; set `inference.engine` to "vllm", or leave it out',
            )
