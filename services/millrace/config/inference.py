"""`[inference]`: the engine that serves the policy."""

from typing import Literal

from millrace.config.section import Section, option, table
from millrace.config.shared import DEFAULT_MODEL

DEFAULT_MAX_NUM_SEQS = 256


class InferenceModelConfig(Section):
    """The engine's copy of the model. Its number format is that of the published policy."""

    name: str = option(
        DEFAULT_MODEL,
        "Only checked: has to be equal to `model.name`; the engine serves what the trainer publishes. Shared: "
        "`model.name`.",
        min_length=1,
    )
    max_model_len: int | None = option(
        None,
        "Longest sequence in tokens that the engine serves, at least `orchestrator.seq_len`.",
        default_text="`orchestrator.seq_len`",
        ge=2,
    )


class ServerConfig(Section):
    """Where the engine listens for HTTP."""

    host: str = option("127.0.0.1", "Address to listen on.", min_length=1)
    port: int | None = option(
        None, "Port, 1 to 65535. A free one is picked if left out: engines are found by registration.", ge=1, le=65535
    )


class InferenceConfig(Section):
    """The engine of the stack that `millrace rl` starts for the run.

    A stack that runs already (`--server`, `millrace up`) keeps its own settings: MILLRACE_MAX_NUM_SEQS,
    MILLRACE_MAX_MODEL_LEN and MILLRACE_HTTP_LISTEN of its inference process.
    """

    engine: Literal["embedded"] = option(
        "embedded", "Which engine. embedded, the transformers-based one for CPU and GPU, is the only one so far."
    )
    model: InferenceModelConfig = table(InferenceModelConfig, "The model.")
    server: ServerConfig = table(ServerConfig, "Where it listens.")
    max_num_seqs: int = option(
        DEFAULT_MAX_NUM_SEQS, "Most sequences that one engine generates at the same time, at least 1.", ge=1
    )
