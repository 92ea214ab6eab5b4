"""`[orchestrator.buffer]` and `[[orchestrator.filters]]`: which tasks are drawn, and which rollouts are left out."""

from collections.abc import Iterator
from typing import Literal

from millrace.config.section import (
    IMPORT_PATH_PATTERN,
    BrokenRule,
    ConfigSection,
    FreeTable,
    broken,
    option,
    required,
    table,
)
from millrace.config.tree import Facts

_AT = "orchestrator.buffer."


class RatioConfig(ConfigSection):
    """Ratios of the environments from a step on."""

    step: int = required("First step of which tasks are drawn so.", ge=0)
    env_ratios: list[float] = required(
        "Share of the tasks for each `[[orchestrator.env]]`, in order; 0: none.",
        min_length=1,
    )


class BufferConfig(ConfigSection):
    """Easy, normal and hard tasks, of which only normal ones are drawn."""

    easy_threshold: float | None = option(
        None,
        "Tasks of at least this mean reward become easy.",
        facts=Facts(default_text="off", aliases=("easy_border",)),
    )
    hard_threshold: float | None = option(
        None,
        "Tasks of at most this mean reward become hard.",
        facts=Facts(default_text="off", aliases=("hard_border",)),
    )
    easy_fraction: float = option(
        0.0,
        "Share of the easy tasks that become normal when a run is forked, or resumed after a failure.",
        ge=0,
        le=1,
    )
    hard_fraction: float = option(0.0, "Likewise for hard tasks.", ge=0, le=1)
    hard_replay: float = option(
        0.0,
        "Share of draws that play hard tasks again; better rewards make them normal or easy.",
        ge=0,
        lt=1,
    )
    online_difficulty_filtering: bool = option(
        False,
        "Replace groups whose rewards are all at one end of `reward_range`.",
    )
    schedule: list[RatioConfig] = table(
        list,
        "Ratios of the environments that change on the way (`[[orchestrator.buffer.schedule]]`); before its first step "
        "`weight` of each `[[orchestrator.env]]` counts.",
    )

    sampler: str | None = option(
        None,
        "`my.module:fn` of (ordinal, tasks, *, step, seed, **kwargs) that returns (environment, index). "
        "`tasks` maps environments to indices that may be drawn.",
        pattern=IMPORT_PATH_PATTERN,
    )
    sampler_kwargs: FreeTable = table(dict, "Arguments of `sampler`.")

    @property
    def has_pools(self) -> bool:
        """Return whether any task can become easy or hard."""
        return self.easy_threshold is not None or self.hard_threshold is not None

    @property
    def changes_draws(self) -> bool:
        """Return whether rewards so far, or a schedule, influence which tasks are drawn.

        Otherwise the task order alone does.
        """
        return self.has_pools or bool(self.schedule) or self.sampler is not None

    def broken_rules(self, *, num_envs: int) -> Iterator[BrokenRule]:
        """Yield the rules over several keys of this table that do not hold.

        `num_envs` counts the training environments.
        """
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and easy <= hard:
            message = f"must be above `{_AT}hard_threshold`, which is {hard}: else a task would be easy and hard"
            yield broken(message, f"{_AT}easy_threshold", f"{_AT}hard_threshold")
        for pool, threshold, fraction in (("easy", easy, self.easy_fraction), ("hard", hard, self.hard_fraction)):
            if fraction and threshold is None:
                message = f"needs `{_AT}{pool}_threshold`: without it no task is {pool}; set it, or leave this out"
                yield broken(message, f"{_AT}{pool}_fraction", f"{_AT}{pool}_threshold")
        if self.hard_replay and hard is None:
            message = f"needs `{_AT}hard_threshold`: without it no task is hard; set it, or leave this out"
            yield broken(message, f"{_AT}hard_replay", f"{_AT}hard_threshold")
        if self.hard_replay and self.sampler is not None:
            message = f"has no effect beside `{_AT}sampler`, which chooses among normal tasks; leave it out"
            yield broken(message, f"{_AT}hard_replay", f"{_AT}sampler")
        if self.sampler_kwargs and self.sampler is None:
            message = f"has no effect without `{_AT}sampler`; set it, or leave this out"
            yield broken(message, f"{_AT}sampler_kwargs", f"{_AT}sampler")
        schedule, where = f"{_AT}schedule", "orchestrator.env"
        if self.schedule and self.sampler is not None:
            message = f"has no effect beside `{_AT}sampler`, which chooses the environment as well; leave it out"
            yield broken(message, schedule, f"{_AT}sampler")
        steps = [entry.step for entry in self.schedule]
        if steps != sorted(set(steps)):
            yield broken("must have ascending steps, each once; put its entries in order", schedule)
        for entry in self.schedule:
            if len(entry.env_ratios) != num_envs:
                message = (
                    f"has {len(entry.env_ratios)} env_ratios at step {entry.step}, but there are {num_envs} training "
                    "environments; name one for each, 0 for none"
                )
                yield broken(message, schedule, where)
            elif min(entry.env_ratios) < 0 or not sum(entry.env_ratios):
                message = f"has env_ratios at step {entry.step} that are below 0, or all 0; let one be above 0"
                yield broken(message, schedule)


# `[[orchestrator.filters]]`: rollouts that are not trained on as they are, and what is done with them.

_ONLY_FOR = {
    "penalty": ("action", "penalise"),
    "window": ("type", "repetition"),
    "prob_threshold": ("type", "repetition"),
    "token_id_threshold": ("type", "gibberish"),
    "logprob_threshold": ("type", "gibberish"),
}
"""Keys that have a meaning only beside a value of another one."""


class FilterConfig(ConfigSection):
    """One filter. Metrics count what it finds."""

    type: Literal["truncated", "repetition", "gibberish"] = required("What it finds: docs/algorithms.md.")
    action: Literal["count", "mask", "drop", "penalise"] = option(
        "mask",
        "What becomes of such rollouts: docs/algorithms.md.",
    )
    penalty: float = option(
        1.0,
        "penalise: subtracted from the reward.",
        gt=0,
    )
    window: int = option(3000, "repetition: sampled tokens in a row.", ge=2)
    prob_threshold: float = option(0.99, "repetition: each is more probable than this.", gt=0, lt=1)
    token_id_threshold: int = option(100_000, "gibberish: a rare token has a greater id.", ge=0)
    logprob_threshold: float = option(
        -13.9,
        "gibberish: its log-probability is below this.",
        lt=0,
    )

    def misplaced(self) -> Iterator[tuple[str, str, str]]:
        """Yield (key, the key that disables it, message) for each key of the filter that is set and has no effect."""
        for key, (other, value) in _ONLY_FOR.items():
            if getattr(self, other) != value and getattr(self, key) != type(self).model_fields[key].default:
                yield key, other, f"has no meaning for {getattr(self, other)}, only for {value}; leave it out"
