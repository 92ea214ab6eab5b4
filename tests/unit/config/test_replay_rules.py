"""`trainer.model.moe.replay`: what it needs, and what it does not go with, by the name of the key."""

from collections.abc import Callable
from typing import Any

import pytest

from millrace.config import Loaded, RLConfig
from millrace.errors import Violation

KEY = "trainer.model.moe.replay"
REPLAY, RECORDED = f"--{KEY}", "--inference.return-routed-experts"


@pytest.mark.parametrize(
    "recorded", [[RECORDED], ["--inference.engine", "vllm", "--inference.vllm.enable-return-routed-experts"]]
)
def test_it_is_right_with_an_engine_that_records(load_rl: Callable[..., Loaded[RLConfig]], recorded: list[str]) -> None:
    assert load_rl(REPLAY, *recorded).config.trainer.model.moe.replay
    assert not load_rl(*recorded).config.trainer.model.moe.replay, "it is off by default"


def test_it_needs_an_engine_that_records(violations: Callable[..., list[Violation]]) -> None:
    [found] = violations(REPLAY)
    assert found.field == KEY and "set `inference.return_routed_experts = true`" in found.message


@pytest.mark.parametrize("other", ["compile.fullgraph", "tp", "cp", "ep"])
def test_it_is_refused_with_what_it_is_not_proved_with(violations: Callable[..., list[Violation]], other: str) -> None:
    value: list[Any] = ["2"] if len(other) == 2 else []
    [found] = [each for each in violations(REPLAY, RECORDED, f"--trainer.model.{other}", *value) if each.field == KEY]
    assert found.message.startswith("must be false with")
