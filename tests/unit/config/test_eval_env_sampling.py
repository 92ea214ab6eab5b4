"""`sampling` of one evaluated environment: in runs, in evaluations and beside a fine-tune, over that of all."""

from pathlib import Path
from typing import Any

import pytest

from millrace.config import EvalRunConfig, RLConfig, SFTConfig, load
from millrace.errors import InvalidSpecError
from millrace.orchestrator.play.settings import of_run, of_training

RL = """\
max_steps = 5
seq_len = 64
[model]
name = "m"
[orchestrator]
batch_size = 8
rollouts_per_example = 2
[[orchestrator.env]]
id = "a"
sampling = { temperature = 0.7 }
"""
RL_EVAL = """\
[orchestrator.eval.sampling]
temperature = 0.0
top_p = 0.9
extra_body = { x = 1 }
[[orchestrator.eval.env]]
id = "a"
[[orchestrator.eval.env]]
id = "b"
"""
RUN = """\
model.name = "m"
sampling = { temperature = 0.0, extra_body = { x = 1 } }
[[env]]
id = "a"
[[env]]
id = "b"
"""


def read(tmp_path: Path, text: str, model: Any = RLConfig) -> Any:
    (tmp_path / "a.toml").write_text(text)
    return load(model, ["@", "a.toml"], {}, cwd=tmp_path).config


def sampled(settings: Any) -> list[Any]:
    return [env.sampling for env in settings.envs]


def test_what_an_environment_leaves_out_is_as_for_all(tmp_path: Path) -> None:
    own = "sampling = { temperature = 0.5, max_completion_tokens = 7, min_tokens = 2, extra_body = { y = 2 } }"
    first, second = sampled(of_training(read(tmp_path, RL + RL_EVAL + own).orchestrator))
    assert (first.temperature, first.top_p, first.max_tokens, first.extra_body_json) == (0.0, 0.9, 0, '{"x": 1}')
    assert (second.temperature, second.top_p, second.max_tokens) == (0.5, 0.9, 7)
    assert second.extra_body_json == '{"min_tokens": 2, "x": 1, "y": 2}'
    first, second = sampled(of_run(read(tmp_path, RUN + own, EvalRunConfig)))
    assert (first.temperature, first.extra_body_json) == (0.0, '{"x": 1}')
    assert (second.temperature, second.max_tokens) == (0.5, 7)
    assert second.extra_body_json == '{"min_tokens": 2, "x": 1, "y": 2}'


def test_how_training_samples_is_not_how_the_same_environment_is_evaluated(tmp_path: Path) -> None:
    [found] = sampled(of_training(read(tmp_path, RL + "[orchestrator.eval]\nnum_examples = 4\n").orchestrator))
    assert found.temperature == 1.0


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ("temperatur = 1", ["orchestrator.eval.env[1].sampling.temperatur", "did you mean"]),
        ("max_tokens = 64", ["orchestrator.eval.env[1].sampling.max_tokens", "must be below `orchestrator.seq_len`"]),
        ("max_tokens = 4, min_tokens = 5", ["orchestrator.eval.env[1].sampling.min_tokens", "must be at most"]),
        ("extra_body = { n = 2 }", ["orchestrator.eval.env[1].sampling.extra_body.n", "set by Millrace"]),
        ("extra_body = { top_p = 0.5 }", ["orchestrator.eval.env[1].sampling.extra_body.top_p", "key of its own"]),
    ],
)
def test_a_mistake_is_told_at_its_own_key(tmp_path: Path, own: str, words: list[str]) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        read(tmp_path, RL + RL_EVAL + f"sampling = {{ {own} }}")
    assert all(word in str(caught.value) for word in words), caught.value
    assert len(caught.value.violations) == 1


def test_so_is_one_of_an_evaluation_and_of_a_fine_tune(tmp_path: Path) -> None:
    own = "sampling = { extra_body = { n = 2 } }"
    with pytest.raises(InvalidSpecError, match=r"env\[1\].sampling.extra_body.n"):
        read(tmp_path, RUN + own, EvalRunConfig)
    with pytest.raises(InvalidSpecError, match=r"eval.env\[0\].sampling.extra_body.n"):
        read(tmp_path, f'data.name = "d"\n[[eval.env]]\nid = "a"\n{own}', SFTConfig)


SOURCES = """\
[[orchestrator.eval.source]]
env.taskset.id = "b"
sampling = { temperature = 0.5, reasoning_effort = "low" }
[[orchestrator.eval.source]]
env.taskset.id = "c"
{other}
"""


@pytest.mark.parametrize(("other", "wanted"), [("", 1.0), ("sampling = { temperature = 0.25 }", 0.25)])
def test_a_sampler_of_one_evaluated_source_is_its_environments(tmp_path: Path, other: str, wanted: float) -> None:
    found = sampled(of_training(read(tmp_path, RL + SOURCES.replace("{other}", other)).orchestrator))
    assert [each.temperature for each in found] == [0.5, wanted]
    assert [each.extra_body_json for each in found] == ['{"reasoning_effort": "low"}', ""]


def test_flat_sources_of_an_evaluation_have_their_own_too(tmp_path: Path) -> None:
    text = 'model.name = "m"\n' + SOURCES.replace("orchestrator.eval.", "").replace("{other}", "")
    assert [each.temperature for each in sampled(of_run(read(tmp_path, text, EvalRunConfig)))] == [0.5, 1.0]
