"""Recorded experts that no token of the policy can have: refused where rollouts come in, and told by a warning."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from millrace.config.sections.orchestrator import EnvConfig, OrchestratorConfig
from millrace.orchestrator.drive.batch_metrics import BatchWarnings
from millrace.orchestrator.play.book import Book
from millrace.orchestrator.play.intake import ExpertsCheck, Intake
from millrace.rollouts.routed_experts import RoutedForm
from millrace.rollouts.types import Purpose, Rollout
from millrace_testing.orchestrator.builders import make_play, make_rollout

FORM = RoutedForm(num_layers=2, num_experts=8, top_k=2)


def _with(experts: np.ndarray, ordinal: int = 0) -> Rollout:
    rollout = make_rollout(ordinal, 0, group_size=2)
    samples = tuple(
        replace(each, routed_experts=experts[: each.num_tokens - 1]) for each in (*rollout.samples, *rollout.samples)
    )
    return replace(rollout, samples=samples)


def _experts(**changes: Any) -> np.ndarray:
    made = np.tile(np.array([0, 7], np.uint8), (64, 2, 1))
    for place, value in changes.items():
        made[0, 1, int(place[1:])] = value
    return made


@pytest.mark.parametrize(
    ("experts", "found"),
    [
        (_experts(), ""),
        (_experts(_0=8), "has expert 8 for a token, and the engine has 2 of 8 experts in each of 2 layers"),
        (_experts(_0=7), "has an expert twice for a token in layer 1"),
        (_experts()[:, :1], "has 2 experts in each of 1 layers"),
        (_experts()[:, :, :1], "has 1 experts in each of 2 layers"),
    ],
)
async def test_a_rollout_stays_in_play_without_experts_that_misfit(experts: np.ndarray, found: str) -> None:
    check = ExpertsCheck(lambda: FORM)
    book = Book()
    intake = Intake(book=book, evaluations={}, policies=cast("Any", SimpleNamespace()), experts=check)
    intake.begin(lambda ordinal, step: make_play(ordinal), has_predecessor=False)
    given = _with(experts)
    intake.take(given)
    [taken] = [each for play in book.plays.values() for each in play.members.values()]
    assert [each.routed_experts is None for each in taken.samples] == [bool(found)] * 2
    assert [each.token_ids.tolist() for each in taken.samples] == [each.token_ids.tolist() for each in given.samples]
    warned = await _warned(check, lambda: None, batches=2)
    assert len(warned) == bool(found)
    assert all(found in message and "ordinal 0, member 0" in message for message in warned)


async def _warned(check: ExpertsCheck, before: Callable[[], object], *, batches: int) -> list[str]:
    """Return the warnings that are written of so many batches, before each of which `before` is called."""
    found: list[str] = []

    async def warning(reason: str, message: str) -> None:
        assert reason == "ROUTED_EXPERTS_MISFIT"
        found.append(message)

    settings = OrchestratorConfig(env=[EnvConfig(id="e")])
    warnings = BatchWarnings(settings, cast("Any", SimpleNamespace(warning=warning)), experts=check)
    for step in range(batches):
        before()
        await warnings.look([], step=step)
    return found


def test_without_a_word_of_the_engine_nothing_is_refused_and_evaluations_never_are() -> None:
    wrong = _with(_experts(_0=8))
    assert ExpertsCheck(lambda: None).checked(wrong) is wrong
    evaluated = replace(wrong, purpose=Purpose.EVAL)
    assert ExpertsCheck(lambda: FORM).checked(evaluated) is evaluated


async def test_misfits_that_go_on_are_told_less_and_less_often() -> None:
    check = ExpertsCheck(lambda: FORM)
    told = await _warned(check, lambda: check.checked(_with(_experts(_0=8), 3)), batches=9)
    assert [text.split(" rollouts so far")[0].split()[-1] for text in told] == ["1", "2", "4", "8"]
    assert all("ordinal 3" in text for text in told)
