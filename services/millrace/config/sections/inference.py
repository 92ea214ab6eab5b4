"""`[inference]`: the engine that serves the policy."""

from collections.abc import Iterator
from typing import Literal

from millrace.config.section import BrokenRule, ConfigSection, Document, FreeTable, broken, option, table, value_at
from millrace.config.sections.shared import DEFAULT_MODEL, SHARED_MODEL, LogConfig
from millrace.config.tree import Facts, Limit, OnlyFor, schema_tree

_VLLM = OnlyFor(
    key="inference.engine",
    values=("vllm", "auto"),
    says='means nothing to the {value} engine; set `inference.engine` to "vllm", or leave it out',
)
_VLLM_ONLY = Facts(only_for=_VLLM)

EMBEDDED_PARSERS = {
    "tool_call_parser": ("hermes", "llama3_json", "llama4_json", "qwen3_coder", "qwen3_json", "qwen3_xml"),
    "reasoning_parser": ("deepseek_r1", "qwen3"),
}
"""The parsers that the embedded engine has, by key; vLLM has these and many more."""
CONSTRAINING_PARSERS = ("glm45", "glm47")
"""Parsers with which vLLM lets the model write nothing but a call's form, once it has begun one."""


class InferenceModelConfig(ConfigSection):
    """The engine's copy of the model."""

    name: str = option(
        DEFAULT_MODEL,
        "Equal to `model.name`; `millrace inference` serves it.",
        facts=SHARED_MODEL,
        min_length=1,
    )
    max_model_len: int | None = option(
        None,
        "Longest sequence in tokens. Scaled positions (longrope, dynamic) use it, also in the trainer.",
        facts=Facts(
            default_text="`orchestrator.seq_len`; the model's own in `millrace inference`",
            limit=Limit("at least", "orchestrator.seq_len", "; raise it or leave it out"),
        ),
        ge=2,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "vLLM: auto is the policy's; any other is refused.",
        facts=_VLLM_ONLY,
    )
    enforce_eager: bool = option(
        False, "vLLM: no compilation and no CUDA graphs; starts sooner, generates slower.", facts=_VLLM_ONLY
    )
    trust_remote_code: bool = option(False, "vLLM: run the model's own code.", facts=_VLLM_ONLY)
    chat_template: str | None = option(None, "vLLM: file of a chat template.", facts=_VLLM_ONLY, min_length=1)
    tool_call_parser: str | None = option(
        None,
        "Format of tool calls, by vLLM's name. The embedded engine has "
        f"{', '.join(EMBEDDED_PARSERS['tool_call_parser'])}.",
        facts=Facts(default_text="hermes in the embedded engine, none in vLLM"),
        min_length=1,
    )
    reasoning_parser: str | None = option(
        None,
        "Format of reasoning, by vLLM's name. The embedded engine has "
        f"{', '.join(EMBEDDED_PARSERS['reasoning_parser'])}.",
        min_length=1,
    )
    enable_auto_tool_choice: bool | None = option(
        None,
        'false: a request with tools is refused unless it has `tool_choice = "none"`.',
        facts=Facts(default_text="true where there is a tool call parser"),
    )


class ParallelConfig(ConfigSection):
    """vLLM: the devices of one replica."""

    tp: int = option(1, "Tensor parallel ranks.", facts=_VLLM_ONLY, ge=1)
    dp: int = option(1, "Data parallel ranks.", facts=_VLLM_ONLY, ge=1)


class ServerConfig(ConfigSection):
    """Where the engine listens for HTTP."""

    host: str = option("127.0.0.1", "Address.", min_length=1)
    port: int | None = option(None, "A free port if left out.", ge=1, le=65535)


class InferenceConfig(ConfigSection):
    """The engine of `millrace rl` and `millrace inference`.

    A running stack (`--server`) keeps its own: MILLRACE_ENGINE, MILLRACE_VLLM_FLAGS, MILLRACE_MAX_NUM_SEQS,
    MILLRACE_MAX_MODEL_LEN, MILLRACE_HTTP_LISTEN.
    """

    engine: Literal["auto", "embedded", "vllm"] = option(
        "auto",
        "auto: vllm if one of its keys is set, or with a GPU and vLLM; else embedded. embedded: transformers, "
        "for laptops and tests. vllm: vLLM 0.32 or 0.33 of `MILLRACE_VLLM_PYTHON`.",
    )
    model: InferenceModelConfig = table(InferenceModelConfig, "The model.")
    parallel: ParallelConfig = table(ParallelConfig, "vLLM: the devices of one replica.")
    server: ServerConfig = table(ServerConfig, "Where it listens.")
    max_num_seqs: int = option(256, "Sequences generated at the same time.", ge=1)
    gpu_memory_utilization: float | None = option(
        None,
        "vLLM: its share of the GPU's memory.",
        facts=Facts(default_text="vLLM's", only_for=_VLLM),
        gt=0,
        le=1,
    )
    sleep_while_training: bool = option(
        False,
        "Replicas free weights and KV cache while a batch is trained on the same GPUs. Needs `async_level = "
        "0` and, in a running stack, vLLM's `enable_sleep_mode`.",
    )
    return_routed_experts: bool = option(
        False,
        "Mixtures of experts: record the experts of every token. vLLM: on CUDA only.",
    )
    vllm: FreeTable = table(
        dict,
        "Other flags of `vllm serve`, such as `enable_prefix_caching = true`.",
        facts=_VLLM_ONLY,
    )

    @property
    def context_length(self) -> int | None:
        """Return the longest sequence in tokens that the engine is configured to serve.

        None where the config does not say.
        """
        named = {name.replace("-", "_"): value for name, value in self.vllm.items()}.get("max_model_len")
        return self.model.max_model_len or (named if isinstance(named, int) and named > 0 else None)

    @property
    def needs_vllm(self) -> bool:
        """Return whether a key that only vLLM has is set, or a parser that the embedded engine does not have."""
        return any(self._foreign_parsers()) or any(
            node.facts.only_for is _VLLM and (value := value_at(self, node.path)) and value != node.default
            for node in schema_tree(type(self)).walk()
        )

    def broken_rules(self) -> Iterator[BrokenRule]:
        """Yield the rules over several keys that do not hold.

        They forbid parsers that the engine lacks, and tool calls without a parser.
        """
        if self.engine == "embedded":
            for key in self._foreign_parsers():
                yield broken(
                    f"is no parser of the embedded engine; write one of {', '.join(EMBEDDED_PARSERS[key])}, or set "
                    '`inference.engine` to "vllm"',
                    f"inference.model.{key}",
                    "inference.engine",
                )
        if self.engine == "vllm" and self.model.enable_auto_tool_choice and self.model.tool_call_parser is None:
            yield broken(
                "needs a parser in vLLM: write `inference.model.tool_call_parser`",
                "inference.model.enable_auto_tool_choice",
                "inference.model.tool_call_parser",
            )

    def _foreign_parsers(self) -> list[str]:
        """Return the keys of the model's table that name a parser which the embedded engine does not have."""
        return [key for key, names in EMBEDDED_PARSERS.items() if getattr(self.model, key) not in (None, *names)]


class ReplicaConfig(Document):
    """One replica in the foreground: `millrace inference @ infer.toml`.

    The file is either the `[inference]` section itself, as in the split form, or has it under that name.
    """

    inference: InferenceConfig = table(InferenceConfig, "The engine.")
    log: LogConfig = table(LogConfig, "Logs.")

    def broken_rules(self) -> list[BrokenRule]:
        """Return rules over several keys that do not hold."""
        return [*self.inference.broken_rules(), *super().broken_rules()]
