"""`[orchestrator.env.sampling]`: how one environment's policy is sampled, over what the run says."""

from pathlib import Path
from typing import Any

import pytest

from millrace.config import RLConfig, load
from millrace.errors import InvalidSpecError
from millrace.orchestrator.play.settings import plays_of_training

BASE = """\
max_steps = 5
seq_len = 64
[model]
name = "m"
[orchestrator]
batch_size = 8
rollouts_per_example = 2
"""


def read(tmp_path: Path, text: str) -> Any:
    (tmp_path / "a.toml").write_text(BASE + text)
    return load(RLConfig, ["@", "a.toml"], {}, cwd=tmp_path)


def envs(own: str, *, run: str = "") -> str:
    table = f"[orchestrator.sampling]\n{run}\n" if run else ""
    return (
        f'{table}[[orchestrator.env]]\nid = "a"\n[[orchestrator.env]]\nid = "b"\n[orchestrator.env.sampling]\n{own}\n'
    )


def plays(loaded: Any) -> list[Any]:
    settings = loaded.config.orchestrator
    return [plays_of_training(settings, env) for env in settings.env]


def test_what_is_left_out_is_the_runs(tmp_path: Path) -> None:
    run = 'top_p = 0.9\nmax_tokens = 32\nstop = ["x"]\nextra_body = { chat_template_kwargs = { thinks = true } }'
    first, second = plays(read(tmp_path, envs("temperature = 0.5\nextra_body = { y = 1 }", run=run)))
    assert (first.sampling.temperature, second.sampling.temperature) == (1.0, 0.5)
    assert (second.sampling.top_p, second.sampling.max_tokens) == (0.9, 32)
    assert '"stop": ["x"]' in second.sampling.extra_body_json and '"y": 1' in second.sampling.extra_body_json
    assert '"thinks": true' in second.sampling.extra_body_json and '"y"' not in first.sampling.extra_body_json


def test_a_temperature_takes_the_place_of_the_schedule_and_a_schedule_that_of_a_temperature(tmp_path: Path) -> None:
    schedule = "temp_scheduler = { start_temperature = 1.0, end_temperature = 0.5 }"
    first, second = plays(read(tmp_path, envs("temperature = 0.7", run=schedule)))
    assert [play.sampling_at(4).temperature for play in (first, second)] == [0.5, 0.7]
    assert (first.sampling.holds_temperature, second.sampling.holds_temperature) == (True, False)
    first, second = plays(read(tmp_path, envs(schedule, run="temperature = 0.7")))
    assert [play.sampling_at(4).temperature for play in (first, second)] == [0.7, 0.5]


def test_a_reply_as_long_as_a_sample_is_shortened_for_its_prompt(tmp_path: Path) -> None:
    loaded = read(tmp_path, envs("max_completion_tokens = 64"))
    assert plays(loaded)[1].sampling.max_tokens == 63
    assert any("orchestrator.env[1].sampling.max_tokens" in str(note) and "is 63" in str(note) for note in loaded.notes)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ("temperatur = 1", ["orchestrator.env[1].sampling.temperatur", "unknown key; did you mean"]),
        ("temperature = 0", ["orchestrator.env[1].sampling.temperature", "must be above 0"]),
        ("max_tokens = 100", ["orchestrator.env[1].sampling.max_tokens", "must be below `orchestrator.seq_len`"]),
        ("min_tokens = 4", ["orchestrator.env[1].sampling.min_tokens", "allow_biased_sampling"]),
        ("extra_body = { seed = 1 }", ["orchestrator.env[1].sampling.extra_body.seed", "the same tokens"]),
    ],
)
def test_a_mistake_is_told_once_at_its_own_key(tmp_path: Path, own: str, words: list[str]) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        read(tmp_path, envs(own))
    assert all(word in str(caught.value) for word in words), caught.value
    assert len(caught.value.violations) == 1 and "a.toml:" in str(caught.value)


def test_a_mistake_of_the_runs_is_not_told_again_for_each_environment(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        read(tmp_path, envs("temperature = 0.5", run="min_tokens = 4"))
    assert [each.field for each in caught.value.violations] == ["orchestrator.sampling.min_tokens"]


def test_a_wrong_key_below_an_environments_algorithm_is_the_only_violation(tmp_path: Path) -> None:
    algo = '[[orchestrator.env]]\nid = "a"\n[orchestrator.env.algo]\ntype = "grpo"\nstd_nrm = "group"\n'
    with pytest.raises(InvalidSpecError) as caught:
        read(tmp_path, algo)
    assert [each.field for each in caught.value.violations] == ["orchestrator.env[0].algo.std_nrm"]
    assert "a.toml:12" in str(caught.value)


def test_distillation_refuses_a_temperature_of_an_environments_own(tmp_path: Path) -> None:
    algo = '[orchestrator.algo]\ntype = "opd"\nteacher = { model = "t", base_url = ["http://127.0.0.1:1/v1"] }\n'
    with pytest.raises(InvalidSpecError) as caught:
        read(tmp_path, algo + envs("temperature = 0.5"))
    assert any(each.field == "orchestrator.env[1].sampling.temperature" for each in caught.value.violations)
