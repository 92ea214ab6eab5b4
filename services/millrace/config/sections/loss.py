"""`[trainer.loss]`: the policy loss, corrections for off-policy data, and how tokens are weighted."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

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
from millrace.config.tree import Facts, OnlyFor, Path

# gspo clips the geometric mean over a sample, which stays near 1: the bounds are those of its paper (arXiv:2507.18071).
_CLIPS = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
_MASKS = {"token_mask": (0.5, 2.0), "sequence_mask": (0.5, 2.0), "geometric_mask": (0.99, 1.01)}
_WEIGHTS = {"token_tis": (0.0, 2.0), "sequence_tis": (0.0, 5.0), "icepop": (0.5, 5.0)}
_BOUNDS = _MASKS | _WEIGHTS
_BY_TOKEN = ("token_tis", "icepop", "token_mask")


def _for(*types: str, **facts: Any) -> Facts:
    """Return facts of a key that means something only for losses of these types; `facts` are further ones."""
    return Facts(only_for=OnlyFor(".type", types), **facts)


def _by_type(values: Mapping[str, Any], otherwise: Any = None) -> Any:
    """Return a function that makes a key's default from the raw table: the entry of `values` for the table's `type`.

    `otherwise` is the default for other types.
    """
    return lambda table: values.get(str(table.get("type")), otherwise)


class CorrectionConfig(ConfigSection):
    """One correction for tokens that another policy sampled. r is the ratio of the trained policy to it."""

    type: Literal["token_tis", "sequence_tis", "icepop", "token_mask", "sequence_mask", "geometric_mask"] = required(
        "Weight of a token. token_tis: min(r, high). sequence_tis: the same of the sample's product. icepop: "
        "r, 0 outside of low to high. token_mask, sequence_mask, geometric_mask: 1, 0 where r, its product or "
        "its geometric mean is outside."
    )
    low: float = option(
        0.0,
        "Least ratio.",
        facts=Facts(
            default_from=_by_type({name: low for name, (low, _) in _BOUNDS.items()}, 0.0),
            default_text="0.5; 0.99 for geometric_mask; 0 for the truncated ones",
        ),
        ge=0,
    )
    high: float = option(
        2.0,
        "Largest ratio.",
        facts=Facts(
            default_from=_by_type({name: high for name, (_, high) in _BOUNDS.items()}, 2.0),
            default_text="2; 5 for icepop and sequence_tis; 1.01 for geometric_mask",
        ),
        gt=0,
    )


class KlConfig(ConfigSection):
    """A KL divergence to the start model."""

    coef: float = required("Factor of the divergence.", gt=0)
    place: Literal["loss", "reward"] = option(
        "loss",
        "loss: a term of the loss. reward: taken from each token's advantage.",
    )
    estimator: Literal["k1", "k2", "k3"] = option(
        "k3",
        "docs/algorithms.md has the formulas.",
        facts=Facts(
            default_from=lambda table: "k1" if table.get("place") == "reward" else "k3",
            default_text="k3; k1 in the reward",
        ),
    )


class LossConfig(ConfigSection):
    """The policy loss."""

    type: Literal["default", "ppo", "gspo", "cispo", "importance_sampling", "ipo", "custom"] = option(
        "default",
        "docs/algorithms.md has the formulas.",
    )
    import_path: str | None = option(
        None,
        "custom: `my.module:fn`, with the signature of `millrace.trainer.losses.policy_losses`.",
        facts=_for("custom"),
        pattern=IMPORT_PATH_PATTERN,
    )
    kwargs: FreeTable = table(dict, "custom: the function's `config.kwargs`.", facts=_for("custom"))
    dppo_mask_low: float = option(
        0.2,
        "Drop a token with advantage <= 0 whose probability fell by more.",
        facts=_for("default"),
        ge=0,
        le=1,
    )
    dppo_mask_high: float = option(
        0.2,
        "Drop a token with advantage > 0 whose probability rose by more.",
        facts=_for("default"),
        ge=0,
        le=1,
    )
    ipo_threshold: float = option(
        0.1,
        "Drop a token whose probability moved by more.",
        facts=_for("ipo"),
        ge=0,
        le=1,
    )
    max_importance_ratio: float | None = option(
        None,
        "Largest ratio of a kept token.",
        facts=_for("default", "ipo", "ppo", "importance_sampling"),
        ge=1,
    )
    adv_tau: float = option(
        1.0,
        "Factor of the policy gradient.",
        facts=_for("default", "ipo", "ppo", "gspo", "cispo", "importance_sampling"),
        ge=0,
    )
    kl_tau: float = option(1e-3, "Factor of the squared log-ratio.", facts=_for("default", "ipo"), ge=0)
    clip_low: float | None = option(
        None,
        "Ratios are clipped at 1 minus this.",
        facts=_for(
            *_CLIPS,
            default_from=_by_type({name: low for name, (low, _) in _CLIPS.items()}),
            default_text="0.2 for ppo, 3e-4 for gspo, 1 for cispo",
        ),
        ge=0,
        le=1,
    )
    clip_high: float | None = option(
        None,
        "Ratios are clipped at 1 plus this.",
        facts=_for(
            *_CLIPS,
            default_from=_by_type({name: high for name, (_, high) in _CLIPS.items()}),
            default_text="0.2 for ppo, 4e-4 for gspo, 4 for cispo",
        ),
        ge=0,
    )
    dual_clip: float | None = option(
        None,
        "ppo: drop a token with advantage < 0 and a greater ratio.",
        facts=_for("ppo"),
        gt=1,
    )
    correction: list[CorrectionConfig] = table(
        list, "Corrections for off-policy data, applied in this order; none if left out."
    )
    kl: KlConfig | None = option(None, "Keep the policy near its start model; off if left out.")
    entropy_coef: float = option(0.0, "Factor of an entropy bonus.", ge=0)
    aggregation: Literal["token", "sequence", "constant", "prompt"] = option(
        "token",
        "How tokens are weighted: docs/algorithms.md.",
        facts=Facts(default_from=_by_type({"gspo": "sequence"}, "token"), default_text="token; sequence for gspo"),
    )
    constant_tokens: int | None = option(
        None,
        "constant: divisor of every sample's sum, required there.",
        facts=Facts(only_for=OnlyFor(".aggregation", ("constant",))),
        ge=1,
    )

    def broken_rules(self, where: str) -> Iterator[BrokenRule]:
        """Yield the rules over several keys of this table that do not hold.

        `where` is the table's dotted path, for messages.
        """
        if self.aggregation == "constant" and self.constant_tokens is None:
            message = "is required for constant: set it to the longest sample, for instance `seq_len`"
            yield broken(message, f"{where}.constant_tokens", f"{where}.aggregation")
        if self.type == "custom" and self.import_path is None:
            message = "is required for custom: name the function, as my.module:fn"
            yield broken(message, f"{where}.import_path", f"{where}.type")
        if self.kl is not None and (self.kl.place == "reward") != (self.kl.estimator == "k1"):
            message = (
                "must be k2 or k3 in the loss: the gradient of k1 there has a mean of 0; or take it from the reward "
                'with `place = "reward"`'
                if self.kl.estimator == "k1"
                else "must be k1 in the reward: the others are losses; leave it out, or set `place` to loss"
            )
            yield broken(message, f"{where}.kl.estimator", f"{where}.kl.place")
        if self.type == "gspo" and self.aggregation == "token":
            message = "must be sequence, constant or prompt for gspo: its ratio is that of a whole sample"
            yield broken(message, f"{where}.aggregation", f"{where}.type")
        weights = [each.type for each in self.correction if each.type in _WEIGHTS]
        for index, each in enumerate(self.correction):
            path: Path = (*where.split("."), "correction", index)
            if each.low > each.high:
                message = f"must be at most `high`, which is {each.high:g}; lower it"
                yield BrokenRule(paths=((*path, "low"),), message=message)
            if message := self._misplaced(each.type, weights):
                yield BrokenRule(paths=((*path, "type"), (*where.split("."), "type")), message=message)

    def _misplaced(self, correction: str, weights: list[str]) -> str:
        """Return why a correction of the type `correction` does not go with the loss, as a message; empty if it does.

        `weights` are the types of the loss's corrections that weigh by a ratio: only one may.
        """
        if self.type == "custom":
            return "is no part of a custom loss: correct in the function, or leave it out"
        if self.type == "gspo" and correction in _BY_TOKEN:
            return "corrects single tokens, and gspo has one ratio for a whole sample; use one of its sequence variants"
        if correction in _WEIGHTS and self.type not in ("ppo", "importance_sampling"):
            return (
                f"corrects twice: {self.type} weighs by the ratio to the policy that sampled already; use a mask, or "
                "ppo or importance_sampling"
            )
        if correction in _WEIGHTS and len(weights) > 1:
            return f"weighs by the same ratio again ({', '.join(weights)}); leave one"
        return ""
