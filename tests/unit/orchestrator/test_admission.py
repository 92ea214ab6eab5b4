import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.orchestrator.play.routing import AdmissionRule


def rule(*, groups: int = 4, level: int = 1, off_policy: int = 8, factor: float = 1.0, max_steps: int | None = None):
    return AdmissionRule(
        rollouts_per_step=groups,
        async_level=level,
        max_off_policy_steps=off_policy,
        oversampling_factor=factor,
        max_steps=max_steps,
    )


def test_level_0_starts_nothing_for_a_step_before_its_version_serves() -> None:
    on_policy = rule(level=0)
    assert on_policy.num_allowed(step=0, served_version=0) == 4
    assert on_policy.num_allowed(step=1, served_version=0) == 0
    assert on_policy.num_allowed(step=1, served_version=1) == 4


def test_the_last_steps_admit_no_more_than_they_need() -> None:
    assert rule(level=3, max_steps=10).num_allowed(step=9, served_version=9) == 4
    assert rule(level=3, max_steps=10).num_allowed(step=10, served_version=10) == 0


def test_oversampling_rounds_up() -> None:
    assert rule(groups=3, level=0, factor=1.5).num_allowed(step=0, served_version=0) == 5


@given(
    level=st.integers(0, 4),
    groups=st.integers(1, 8),
    factor=st.sampled_from([1.0, 1.25, 2.0]),
    seed=st.integers(0, 2**16),
)
def test_simulated_runs_keep_the_bound_on_work_ahead(level: int, groups: int, factor: float, seed: int) -> None:
    """Random interleaving of admission, cutting, training and serving never has more than L + 1 steps ahead."""
    rng = random.Random(seed)
    admission = rule(groups=groups, level=level, factor=factor)
    table: list[int] = []  # planned step's minimum version at dispatch: version served then
    step = trained = served = 0
    for _ in range(300):
        match rng.randrange(4):
            case 0:
                while len(table) < admission.num_allowed(step=step, served_version=served):
                    planned = admission.planned_step(step=step, num_ahead=len(table))
                    if served < admission.min_version(planned_step=planned):
                        break
                    table.append(served)
            case 1 if len(table) >= groups and admission.may_cut(step=step, served_version=served):
                batch, table = table[:groups], table[groups:]
                oldest_allowed = level if factor == 1.0 else 2 * level + 1
                assert all(step - version <= oldest_allowed for version in batch)
                if level == 0:
                    assert all(version == step for version in batch)
                    table = []
                step += 1
            case 2 if trained < step:
                trained += 1
            case 3:
                served = trained
        assert len(table) <= -(-(level + 1) * groups * factor // 1)
        assert step - served <= level + 1


@pytest.mark.parametrize(("oldest", "eligible"), [(2, True), (1, False)])
def test_eligibility_is_one_predicate(oldest: int, eligible: bool) -> None:
    assert rule(off_policy=8).is_eligible(step=10, min_policy_version=oldest) is eligible
