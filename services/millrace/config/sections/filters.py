"""`[[orchestrator.filters]]`: rollouts that are not trained on as they are, and what is done with them."""

from collections.abc import Iterator
from typing import Literal

from millrace.config.section import ConfigSection, option, required

_ONLY_FOR = {
    "penalty": ("action", "penalise"),
    "window": ("type", "repetition"),
    "prob_threshold": ("type", "repetition"),
    "token_id_threshold": ("type", "gibberish"),
    "logprob_threshold": ("type", "gibberish"),
}
"""Keys that have a meaning only beside a value of another one."""


class FilterConfig(ConfigSection):
    """One filter. The batch's event and the metrics count the rollouts that it found."""

    type: Literal["truncated", "repetition", "gibberish"] = required(
        "truncated: cut at a token limit. repetition: a long run of near-certain tokens, as in a loop. gibberish: a "
        "rare token was sampled that the policy found very unlikely."
    )
    action: Literal["count", "mask", "drop", "penalise"] = option(
        "mask",
        "count: only count. mask: compare the rollout with the others of its task, but do not train on it. drop: do "
        "not compare it either. penalise: lower its reward by `penalty` in comparisons.",
    )
    penalty: float = option(
        1.0,
        "penalise only: what is taken off the reward.",
        gt=0,
    )
    window: int = option(3000, "repetition only: this many sampled tokens in a row.", ge=2)
    prob_threshold: float = option(0.99, "repetition only: each with a probability above this.", gt=0, lt=1)
    token_id_threshold: int = option(100_000, "gibberish only: a rare token is one with a greater id.", ge=0)
    logprob_threshold: float = option(
        -13.9,
        "gibberish only: very unlikely is a log-probability below this. The default is 2 nats below a uniform choice "
        "among 150,000 tokens.",
        lt=0,
    )

    def misplaced(self) -> Iterator[tuple[str, str, str]]:
        """Keys without a meaning here, each with the key that says so and the reason."""
        for key, (other, value) in _ONLY_FOR.items():
            if getattr(self, other) != value and getattr(self, key) != type(self).model_fields[key].default:
                yield key, other, f"has no meaning for {getattr(self, other)}, only for {value}; leave it out"
