"""`[inference]`: the engine that serves the policy."""

from typing import Literal

from millrace.config.section import Section, option, table
from millrace.config.shared import DEFAULT_MODEL
from millrace.config.trainer import Dtype


class InferenceModelConfig(Section):
    """The engine's copy of the model."""

    name: str = option(DEFAULT_MODEL, "Directory or Hub id. Shared: `model.name`.", min_length=1)
    dtype: Dtype = option("auto", "Number format of the engine. auto: that of the published policy.")
    max_model_len: int | None = option(
        None,
        "Longest sequence in tokens that the engine serves, at least `orchestrator.seq_len`; exactly that if left out.",
        ge=2,
    )


class ServerConfig(Section):
    """Where a local engine listens for HTTP. Engines that run elsewhere listen where MILLRACE_HTTP_LISTEN says."""

    host: str = option("127.0.0.1", "Address to listen on.", min_length=1)
    port: int | None = option(
        None, "Port, 1 to 65535. A free one is picked if left out: engines are found by registration.", ge=1, le=65535
    )


class InferenceConfig(Section):
    """The inference engine of an RL run."""

    engine: Literal["embedded"] = option("embedded", "Which engine. embedded: the transformers-based one, CPU or GPU.")
    model: InferenceModelConfig = table(InferenceModelConfig, "The model.")
    server: ServerConfig = table(ServerConfig, "Where it listens.")
    max_num_seqs: int = option(128, "Most sequences that one engine generates at the same time, at least 1.", ge=1)
