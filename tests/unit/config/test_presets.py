"""`[algo] preset`: one word fills advantages and loss; what is written stays."""

import json
from typing import Any, get_args

import pytest

from millrace.config.filling import PRESETS
from millrace.config.load import validate_document
from millrace.config.sections.shared import Preset
from millrace.errors import InvalidSpecError

TEACHER = {"name": "t", "base_url": ["http://127.0.0.1:1/v1"]}


def document(preset: str, *, algo: dict[str, Any] | None = None, loss: dict[str, Any] | None = None) -> dict[str, Any]:
    extra = {"teacher": TEACHER} if preset == "opd" else {}
    return {
        "model": {"name": "gpt2"},
        "seq_len": 96,
        "algo": {"preset": preset},
        "orchestrator": {"rollouts_per_example": 4, "env": [{"id": "e"}], "algo": {**extra, **(algo or {})}},
        "trainer": {"loss": loss or {}},
    }


def test_every_preset_is_there() -> None:
    assert tuple(PRESETS) == get_args(Preset)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_fills_both_sides(preset: str) -> None:
    config = validate_document(document(preset))
    advantage, loss = PRESETS[preset]  # type: ignore[index]
    for name, value in advantage.items():
        assert getattr(config.orchestrator.algo, name) == value
    for name, value in loss.items():
        assert getattr(config.trainer.loss, name) == (96 if name == "constant_tokens" else value)
    assert validate_document(json.loads(config.resolved_json())) == config, "what it became is a config of its own"


def test_what_is_written_stays() -> None:
    config = validate_document(document("gspo", algo={"std_norm": "none"}, loss={"clip_high": 0.01}))
    assert config.orchestrator.algo.std_norm == "none"
    assert (config.trainer.loss.type, config.trainer.loss.clip_high) == ("gspo", 0.01)


def test_another_type_takes_nothing_of_the_presets() -> None:
    config = validate_document(document("dapo", algo={"type": "rloo"}, loss={"type": "cispo"}))
    assert config.orchestrator.algo.std_norm == "none"
    assert (config.trainer.loss.type, config.trainer.loss.clip_high) == ("cispo", 4.0)


def test_without_a_preset_everything_is_as_it_was() -> None:
    plain = document("grpo")
    del plain["algo"]
    config = validate_document(plain)
    assert (config.orchestrator.algo.std_norm, config.trainer.loss.type) == ("none", "default")
    assert config.orchestrator.filter_zero_advantages is True


def test_an_unknown_preset_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidSpecError, match=r"algo\.preset"):
        validate_document(document("grppo"))
