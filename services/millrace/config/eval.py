"""The config of `millrace eval`: environments played with one fixed model, and no training."""

from pydantic import ValidationInfo, model_validator

from millrace.config.canonical import canonical_json
from millrace.config.client import ClientConfig
from millrace.config.orchestrator import EvalEnvConfig
from millrace.config.rules_base import Finding, raise_for_rules
from millrace.config.section import FreeTable, Section, option, required, table
from millrace.config.shared import LogConfig, RunConfig


class FixedModelConfig(Section):
    """The model that is evaluated."""

    name: str = required(
        "Name that the endpoint knows the model by; without `[client]` a directory with a Hugging Face model.",
        min_length=1,
    )


class FixedSamplingConfig(Section):
    """How the model is sampled."""

    temperature: float = option(1.0, "At least 0; 0 takes the likeliest token.", ge=0)
    max_tokens: int | None = option(
        None,
        "Most tokens sampled per turn, at least 1; what the endpoint allows if left out.",
        aliases=("max_completion_tokens",),
        ge=1,
    )
    top_p: float = option(1.0, "Above 0 and at most 1.", gt=0, le=1)
    extra_body: FreeTable = table(dict, "More fields of the request to the endpoint, passed on as they are.")


class EvalRunConfig(Section):
    """An evaluation run: every task of every environment, with a model that does not change."""

    model: FixedModelConfig = required("The model.")
    client: ClientConfig | None = option(None, "The endpoint that serves the model; our own engine if left out.")
    env: list[EvalEnvConfig] = required("Environments to evaluate on, at least one (`[[env]]`).", min_length=1)
    num_examples: int = option(
        -1, "Tasks per environment: -1 for all held-out tasks (of an environment without any: all), else at least 1."
    )
    rollouts_per_example: int = option(1, "Rollouts per task, at least 1.", aliases=("group_size",), ge=1)
    sampling: FixedSamplingConfig = table(FixedSamplingConfig, "How the model is sampled.")
    pass_threshold: float = option(1.0, "A rollout passes with this reward or more: what pass@k counts.")
    max_concurrent: int = option(64, "Most rollouts that are played at once, at least 1.", ge=1)
    rollout_timeout_s: float = option(
        600.0, "Seconds until an unfinished rollout is given up as failed, above 0.", gt=0
    )
    output_dir: str = option("outputs", "Directory under which the run writes `<run name>/`.", min_length=1)
    run: RunConfig = table(RunConfig, "What the run is called.")
    log: LogConfig = table(LogConfig, "Logs.")

    @model_validator(mode="after")
    def _cross_field_rules(self, info: ValidationInfo) -> "EvalRunConfig":
        """Refuse values that are right alone and wrong together."""
        raise_for_rules(self.broken_rules(), info)
        return self

    def broken_rules(self) -> list[Finding]:
        """Rules over several keys that do not hold."""
        findings = [] if self.client is None else self.client.broken_rules("client")
        if self.num_examples == 0 or self.num_examples < -1:
            findings.append(Finding(paths=(("num_examples",),), message="must be -1 for all tasks, or at least 1"))
        seen: dict[str, int] = {}
        for index, env in enumerate(self.env):
            if env.name in seen:
                message = f"must be unique, but `env[{seen[env.name]}]` is called `{env.name}` too; give it a `name`"
                findings.append(Finding(paths=(("env", index, "name"),), message=message))
            seen.setdefault(env.name, index)
        return findings

    def resolved_json(self) -> str:
        """The whole config with every default as one canonical JSON document; loading it gives the same config."""
        return canonical_json(self)
