"""When the mismatch of trainer and engine learns of: once as it grows, and where it is large from the beginning."""

import pytest

from millrace.trainer.learning.metrics import Disagreement, KlTrend


def told(steps: list[float]) -> dict[int, str]:
    trend = KlTrend()
    return {step: text for step, kl in enumerate(steps) if (text := trend.add(step, kl))}


def test_a_mismatch_that_explodes_in_the_first_steps_is_told_of_at_once() -> None:
    found = told([1e-13, 1e-13, 0.98, 1.7, 1.8, 3.6, 2.9, 0.38, 0.28, 0.07, 0.1, 0.09])
    assert found == {4: "mismatch_kl is 1.7 (steps 2 to 4: 0.98, 1.7, 1.8)"}


def test_growth_is_told_of_with_both_medians() -> None:
    found = told([0.001] * 10 + [0.02] * 5)
    assert list(found) == [12]
    assert found[12].startswith("mismatch_kl rose from 0.001 (median of the steps 0 to 7) to 0.02 (steps 8 to 12: ")


@pytest.mark.parametrize("steps", [[1e-13, 0.14, 1e-13, 0.06, 0.009, 0.04] * 3, [0.6, 0.7, 0.01] * 5, [0.002] * 30])
def test_ordinary_steps_are_not_told_of(steps: list[float]) -> None:
    assert not told(steps)


def test_a_disagreement_on_the_trained_versions_own_tokens_is_told_of_once_with_its_environment() -> None:
    watch = Disagreement()
    assert not watch.add(0, {"on_policy_mismatch_kl/mean": 1e-3}) and not watch.is_large
    both = {"on_policy_mismatch_kl/calm/mean": 1e-9, "on_policy_mismatch_kl/odd/mean": 2.4}
    said = watch.add(1, {"on_policy_mismatch_kl/mean": 1.2, **both})
    assert "in step 1 is 1.2, and 2.4 in environment 'odd'" in said and "learning rate has no part" in said
    assert not watch.add(2, {"on_policy_mismatch_kl/mean": 1.4, **both})
    assert not watch.add(3, {"mismatch_kl/mean": 3.0}) and watch.is_large, "no such tokens: what was seen last counts"
    assert watch.add(4, {"on_policy_mismatch_kl/mean": 15.0})
    assert not watch.add(5, {"on_policy_mismatch_kl/mean": 1e-9}) and not watch.is_large
    assert "is nan" in watch.add(6, {"on_policy_mismatch_kl/mean": float("nan")})
