"""Sections at the top of a config file, the same for RL and SFT, and `[client]`: an endpoint that is not ours."""

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import model_validator

from millrace.config.layers import as_tree
from millrace.config.section import (
    GROUP_PATTERN,
    RUN_NAME_PATTERN,
    BrokenRule,
    ConfigSection,
    Document,
    broken,
    option,
    required,
    table,
)
from millrace.config.tree import Facts, Limit

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
SHARED_MODEL = Facts(shared="model.name")


class ModelConfig(ConfigSection):
    """The model that is trained."""

    name: str = option(
        DEFAULT_MODEL,
        "Directory with a Hugging Face model, or Hub id.",
        min_length=1,
    )


class RunConfig(ConfigSection):
    """What the run is called."""

    name: str | None = option(
        None,
        "At most 63 lower-case letters, digits and dashes, a letter first; made up if left out.",
        pattern=RUN_NAME_PATTERN,
    )


class QueueConfig(ConfigSection):
    """When the run gets workers, and which (docs/operations.md)."""

    priority: int = option(
        0,
        "Runs of a higher one get workers first.",
        ge=-1000,
        le=1000,
    )
    group: str = option(
        "default",
        "Group whose weight and quota count (`MILLRACE_QUEUE_GROUPS`).",
        pattern=GROUP_PATTERN,
    )
    preemptible: bool = option(
        False,
        "Whether it pauses for a waiting run of a higher priority. Without `ckpt` its steps are trained again.",
    )
    min_replicas: int = option(
        0,
        "Replicas that it gets together with its trainer, or not at all; 0: as they become free.",
        ge=0,
        le=1000,
    )
    max_replicas: int | None = option(
        None,
        "Most replicas; its share of all if left out.",
        facts=Facts(limit=Limit("at least", ".min_replicas", "the run gets so many when it begins")),
        ge=1,
    )


class LogConfig(ConfigSection):
    """Logs of the processes that the command starts; others read `MILLRACE_LOG_*`."""

    level: Literal["debug", "info", "warning", "error"] = option("info", "Least severe level written.")
    json_logging: bool = option(False, "JSON lines instead of plain text.")


class LogExtrasConfig(ConfigSection):
    """Tables in Weights & Biases."""

    samples: bool = option(True, "Prompts, completions, rewards and advantages, as `samples`.")
    distributions: bool = option(True, "Rewards, advantages and lengths, as `distributions`.")
    interval: int = option(10, "Steps between tables.", ge=1)


class WandbConfig(ConfigSection):
    """Weights & Biases. The orchestrator, or the SFT command, reads `WANDB_API_KEY`."""

    project: str = option("millrace", "Project of the run.", min_length=1)
    name: str | None = option(None, "Display name; the run's if left out.", min_length=1)
    entity: str | None = option(None, "Owner of the project.", min_length=1)
    group: str | None = option(None, "Group of runs.", min_length=1)
    tags: list[str] = table(list, "Labels of the run.")
    offline: bool = option(False, "Write to disk only, for `wandb sync`.")
    id: str | None = option(
        None,
        "Id there, resumed if it exists; the run's uid if left out.",
        pattern=r"^[A-Za-z0-9_-]{1,128}$",
    )
    log_extras: LogExtrasConfig | None = option(None, "Tables of samples and distributions; off if left out.")


class CheckpointConfig(ConfigSection):
    """Resumable checkpoints; the last step always writes one."""

    resume_step: int | None = option(
        None,
        "Step to resume from, -1: the newest. An earlier step of an RL run makes a fork.",
        ge=-1,
    )
    save_async: bool = option(
        True,
        "Upload from `MILLRACE_SCRATCH_DIR` while training goes on.",
    )
    interval: int | None = option(None, "Steps between checkpoints; only the last step if left out.", ge=1)
    keep_last: int | None = option(
        None, "Newest checkpoints kept; all if left out.", facts=Facts(aliases=("keep",)), ge=1
    )
    keep_interval: int | None = option(
        None,
        "With `keep_last`: keep multiples of this step, too.",
        facts=Facts(needs=(".keep_last", "then every checkpoint is kept")),
        ge=1,
    )


Preset = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "opo", "reinforce_pp", "max_rl", "opd", "opsd"]


class PresetConfig(ConfigSection):
    """An algorithm by one word."""

    preset: Preset | None = option(
        None,
        "Fills what is left out of `orchestrator.algo` and `trainer.loss` (docs/algorithms.md).",
    )


class SharedKeys(Document):
    """What a run and one service's part of it have in common: keys that fill those of the services."""

    model: ModelConfig = table(ModelConfig, "The model that is trained.")
    max_steps: int | None = option(None, "Optimizer steps; unlimited if left out.", ge=1)
    seq_len: int | None = option(
        None, "Longest sample in tokens; none if the services' differ.", facts=Facts(may_differ=True), ge=2
    )
    async_level: int = option(
        1,
        "Steps that sampling may run ahead of training; 0: they take turns.",
        facts=Facts(aliases=("max_async_level",)),
        ge=0,
    )
    seed: int = option(0, "Seed of task order and trainer; sampled tokens have none.", ge=0)
    output_dir: str = option("outputs", "Directory of `<run name>/`.", min_length=1)
    log: LogConfig = table(LogConfig, "Logs.")
    ckpt: CheckpointConfig | None = option(None, "Checkpoints; off if left out.")
    wandb: WandbConfig | None = option(None, "Weights & Biases; off if left out.")


# `[client]`: an OpenAI-compatible endpoint that is not one of ours.

VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
WITHHELD_KEY_PREFIX = "MILLRACE_KEY_"
"""Begins the variables of keys that the env-server itself uses: environments do not inherit them."""


class ClientConfig(ConfigSection):
    """OpenAI-compatible endpoints. If left out, the stack itself serves the model."""

    base_url: list[str] = required(
        "URLs ending in `/v1`; rollouts are spread over them.",
        min_length=1,
    )
    api_key_var: str | None = option(
        None,
        f"Environment variable of the env-server with the key; not `{WITHHELD_KEY_PREFIX}…`.",
        pattern=VARIABLE_PATTERN,
    )

    @model_validator(mode="before")
    @classmethod
    def _one_is_a_list(cls, data: Any) -> Any:
        """Return the raw table with `base_url` as a list of URLs without slashes at their ends."""
        tree = as_tree(data)
        if isinstance(tree, dict) and isinstance(urls := tree.get("base_url"), str | list):
            found = [urls] if isinstance(urls, str) else urls
            tree["base_url"] = [url.rstrip("/") if isinstance(url, str) else url for url in found]
        return tree

    def broken_rules(self, path: str) -> list[BrokenRule]:
        """Return violations of URLs that are invalid, have credentials, or are named twice.

        `path` is this table's dotted path.
        """
        problems = [_problem(url, f"{path}.api_key_var") for url in self.base_url]
        problems += [
            f"must not name {url} twice" for index, url in enumerate(self.base_url) if url in self.base_url[:index]
        ]
        return [broken(problem, f"{path}.base_url") for problem in problems if problem]


def _problem(url: str, variable: str) -> str | None:
    """Return what is wrong with the URL of an endpoint, as a message; None if nothing is.

    `variable` is the config key that names the variable with the endpoint's API key.
    """
    try:
        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https") and parts.hostname
    except ValueError:  # a bracket without its other
        is_http, parts = False, urlsplit("")
    if not is_http:
        return "must be a URL that begins with http:// or https://, such as https://api.example.com/v1"
    if parts.username or parts.password or parts.query:
        return f"must not carry credentials or a query: name the variable with the key in `{variable}`"
    return None
