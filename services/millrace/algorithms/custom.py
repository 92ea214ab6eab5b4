"""A function of the user's own that turns the rewards of a group into advantages."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from millrace.algorithms.base import OverlongPenalty, ScalarAdvantage
from millrace.config.sections.algo import AdvantageConfig
from millrace.custom_code import CustomCode, bad_code
from millrace.rollouts.types import MAX_REWARD

FIELD = "orchestrator.algo.import_path"


class Custom(ScalarAdvantage):
    """`fn(rewards, lengths, **kwargs)`: float64 [G] and int64 [G] (sampled tokens) to advantages [G].

    G is the number of rollouts of the group. The function is pure: what it returned is in the log and is never
    computed again. It is called for groups of equal rewards, too.
    """

    is_shift_invariant = False
    compares = False

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        import_path: str,
        kwargs: Mapping[str, Any],
        overlong: OverlongPenalty | None = None,
    ) -> None:
        super().__init__(overlong=overlong)
        self._function = function
        self._import_path = import_path
        self._kwargs = dict(kwargs)

    @classmethod
    def load(cls, config: AdvantageConfig, code: CustomCode) -> "Custom":
        """Import the function and try it on a group of three; raise InvalidSpecError if it is unusable."""
        path = config.import_path or ""
        custom = cls(
            code.load(path, field=FIELD),
            import_path=path,
            kwargs=config.kwargs,
            overlong=OverlongPenalty.from_config(config),
        )
        custom.advantages(np.asarray([0.0, 1.0, 0.5]), np.asarray([1, 2, 4]))
        return custom

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return what the function returns for a group, float64 [G].

        Raises InvalidSpecError if it raises, or returns another shape or values that are too large or not finite.
        """
        try:
            result = np.asarray(self._function(rewards.copy(), lengths.copy(), **self._kwargs), dtype=np.float64)
        except Exception as error:  # a user's function may raise anything
            raise bad_code(FIELD, self._import_path, f"it raised {type(error).__name__}: {error}") from error
        if result.shape != rewards.shape:
            problem = f"it returned the shape {result.shape}, not one advantage for each of {len(rewards)} rollouts"
            raise bad_code(FIELD, self._import_path, problem)
        if not (np.abs(result) <= MAX_REWARD).all():
            kind = f"beyond ±{MAX_REWARD:g}" if np.isfinite(result).all() else "that is not finite"
            rewards_text = ", ".join(f"{reward:g}" for reward in rewards[:8])
            problem = f"it returned an advantage {kind}, of rewards {rewards_text}"
            raise bad_code(FIELD, self._import_path, problem)
        return result
