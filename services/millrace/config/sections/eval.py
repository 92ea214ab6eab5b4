"""The config of `millrace eval`: environments played with one fixed model, and no training."""

from typing import Literal, Self

from millrace.config.section import BrokenRule, ConfigSection, Document, FreeTable, broken, option, required, table
from millrace.config.sections.environments import EvalEnvConfig, env_names, selection_json
from millrace.config.sections.sampling import extra_body_rules, sampling_key
from millrace.config.sections.shared import ClientConfig, LogConfig, RunConfig
from millrace.config.tree import Facts


class FixedModelConfig(ConfigSection):
    """The model that is evaluated."""

    name: str = required(
        "Name at the endpoint; without `[client]` a directory with a Hugging Face model.",
        min_length=1,
    )


class FixedSamplingConfig(ConfigSection):
    """How the model is sampled."""

    temperature: float = sampling_key("temperature", "0 takes the likeliest token.", ge=0)
    max_tokens: int | None = sampling_key(
        "max_tokens",
        "Most tokens sampled per turn; what the endpoint allows if left out.",
        facts=Facts(aliases=("max_completion_tokens",)),
    )
    top_p: float = sampling_key("top_p")
    top_k: int = sampling_key("top_k")
    min_p: float = sampling_key("min_p")
    repetition_penalty: float = sampling_key("repetition_penalty")
    extra_body: FreeTable = table(dict, "More fields of the request.")


class EvalRunConfig(Document):
    """An evaluation run: every task of every environment, with a fixed model."""

    model: FixedModelConfig = required("The model.")
    client: ClientConfig | None = option(None, "The endpoint that serves the model; our own engine if left out.")
    env: list[EvalEnvConfig] = required("Environments to evaluate on, at least one (`[[env]]`).", min_length=1)
    tasks: Literal["eval", "train"] = option(
        "eval",
        "eval: held-out tasks, or all if there are none. train: training tasks.",
    )
    num_examples: int = option(-1, "Tasks per environment; -1: all.")
    rollouts_per_example: int = option(1, "Rollouts per task.", facts=Facts(aliases=("group_size",)), ge=1)
    sampling: FixedSamplingConfig = table(FixedSamplingConfig, "How the model is sampled.")
    pass_threshold: float = option(1.0, "A rollout passes with at least this reward (pass@k).")
    max_concurrent: int = option(64, "Rollouts played at once.", ge=1)
    rollout_timeout_s: float = option(600.0, "Seconds until an unfinished rollout fails.", gt=0)
    output_dir: str = option("outputs", "Directory of `<run name>/`.", min_length=1)
    run: RunConfig = table(RunConfig, "What the run is called.")
    log: LogConfig = table(LogConfig, "Logs.")

    def with_model(self, name: str) -> Self:
        """Return a copy of the evaluation's config with another `model.name`."""
        return self.model_copy(update={"model": FixedModelConfig(name=name)})

    def selections(self) -> dict[str, str]:
        """Return the selection of tasks as JSON that env-servers take, by the environment's name."""
        is_train = self.tasks == "train"
        return {
            env.name: selection_json(train=env.select if is_train else None, evaluated=None if is_train else env.select)
            for env in self.env
        }

    def broken_rules(self) -> list[BrokenRule]:
        """Return rules over several keys that do not hold."""
        rules = [] if self.client is None else self.client.broken_rules("client")
        if self.num_examples == 0 or self.num_examples < -1:
            rules.append(broken("must be -1 for all tasks, or at least 1", "num_examples"))
        rules += extra_body_rules(self.sampling, "sampling")
        for index, env in enumerate(self.env):
            rules += env.sampling.broken_rules(self.sampling, ("env", index, "sampling"))
        return [*super().broken_rules(), *rules, *env_names(self.env, ("env",))]
