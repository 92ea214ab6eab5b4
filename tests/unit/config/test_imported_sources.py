"""Sources of prime-rl: what each says of its tasks, its sampling and its groups."""

from pathlib import Path
from typing import Any

import pytest

from millrace.cli.session.config_file import import_config
from millrace.config import EvalRunConfig, RLConfig, load
from millrace.errors import InvalidSpecError

BASE = """\
max_steps = 2
[model]
name = "m"
[orchestrator]
batch_size = 8
group_size = 2
"""


def read(tmp_path: Path, text: str, *, model: Any = RLConfig, base: str = BASE) -> Any:
    (tmp_path / "a.toml").write_text(base + text)
    return load(model, ["@", "a.toml"], {}, cwd=tmp_path)


def selections(envs: Any) -> list[dict[str, Any]]:
    return [env.select.model_dump(exclude_defaults=True) if env.select else {} for env in envs]


SOURCES = """\
[[orchestrator.train.source]]
env.taskset.id = "a"
[[orchestrator.train.source]]
env.taskset.id = "b"
{own}
"""


def test_a_selection_of_all_sources_is_that_of_each_without_its_own(tmp_path: Path) -> None:
    shared = '[orchestrator.train]\nselect = { include = { idx = "0:5" } }\n'
    evaluated = '[orchestrator.eval]\nselect = { exclude = { idx = "0:5" }, limit = 3 }\n'
    text = shared + SOURCES.format(own="select = { shuffle = true, limit = 4 }") + evaluated
    config = read(tmp_path, text).config.orchestrator
    assert selections(config.env) == [{"include": {"idx": ["0:5"]}}, {"shuffle": True, "limit": 4}]
    rest = {"exclude": {"idx": ["0:5"]}, "limit": 3}
    assert [env.id for env in config.eval.env] == ["a", "b"] and selections(config.eval.env) == [rest, rest]


def test_a_number_of_tasks_is_num_examples_where_training_takes_all(tmp_path: Path) -> None:
    evaluated = """\
[orchestrator.eval]
select = { limit = 3 }
[[orchestrator.eval.source]]
env.taskset.id = "a"
[[orchestrator.eval.source]]
env.taskset.id = "b"
select = { limit = 5 }
[[orchestrator.eval.source]]
env.taskset.id = "c"
select = { skip = 4 }
"""
    config = read(tmp_path, SOURCES.format(own="") + evaluated).config.orchestrator.eval
    assert (config.num_examples, [env.num_examples for env in config.env]) == (3, [None, 5, -1])
    assert selections(config.env) == [{}, {}, {"skip": 4}]
    config = read(tmp_path, SOURCES.format(own="select = { skip = 9 }") + evaluated).config.orchestrator.eval
    assert (config.num_examples, [env.num_examples for env in config.env]) == (-1, [None, None, None])
    assert selections(config.env) == [{"limit": 3}, {"limit": 5}, {"skip": 4}], "not of those that are trained on"


def test_an_evaluation_of_its_own_selects(tmp_path: Path) -> None:
    text = """\
model = "m"
select = { include = { ids = ["x"] } }
[client]
base_url = "http://127.0.0.1:1/v1"
[[source]]
env.taskset.id = "a"
[[source]]
env.taskset.id = "b"
select = { limit = 2 }
"""
    config = read(tmp_path, text, model=EvalRunConfig, base="").config
    assert selections(config.env) == [{"include": {"ids": ["x"]}}, {}]
    assert [env.num_examples for env in config.env] == [None, 2]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (
            "select = { limitt = 4 }",
            ["orchestrator.env[1].select.limitt", "did you mean `orchestrator.env[1].select.limit`"],
        ),
        ("select = { limit = 0 }", ["orchestrator.env[1].select.limit", "must be at least 1", ":11"]),
        ("select = { include = { idx = '9:3' } }", ["select.include.idx", "slice '9:3' is empty", ":11"]),
        ("select = 3", ["orchestrator.env[1].select", "table"]),
    ],
)
def test_a_wrong_selection_is_told_with_its_place(tmp_path: Path, own: str, words: list[str]) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        read(tmp_path, SOURCES.format(own=own))
    assert all(word in str(caught.value) for word in words), caught.value
    evaluated = f"[[orchestrator.eval.source]]\nenv.taskset.id = 'a'\n{own}\n"
    with pytest.raises(InvalidSpecError, match=r"orchestrator\.eval\.(env|source)\[0\]\.(select|num_examples)"):
        read(tmp_path, SOURCES.format(own="") + evaluated)


def test_sources_keep_the_sampling_and_the_group_size_that_differ(tmp_path: Path) -> None:
    text = """\
[orchestrator.train.sampling]
temperature = 0.9
[[orchestrator.train.source]]
env.taskset.id = "a"
group_size = 4
sampling = { temperature = 0.5, max_completion_tokens = 8, reasoning_effort = "low" }
[[orchestrator.train.source]]
env.taskset.id = "b"
"""
    settings = read(tmp_path, text).config.orchestrator
    first, second = (settings.sampling_of(env) for env in settings.env)
    assert settings.group_sizes == {"a": 4, "b": 2}
    assert (first.temperature, first.max_tokens, first.extra_body) == (0.5, 8, {"reasoning_effort": "low"})
    assert (second.temperature, second.max_tokens, second.extra_body) == (0.9, None, {})


def test_what_all_sources_say_is_the_runs(tmp_path: Path) -> None:
    both = "group_size = 4\nsampling = { temperature = 0.5 }\n"
    text = "".join(f'[[orchestrator.train.source]]\nenv.taskset.id = "{name}"\n{both}' for name in "ab")
    settings = read(tmp_path, text, base=BASE.replace("group_size = 2\n", "")).config.orchestrator
    assert settings.rollouts_per_example == 4 and settings.sampling.temperature == 0.5
    assert [env.rollouts_per_example for env in settings.env] == [None, None]


def test_an_import_says_which_loss_is_taken_where_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(BASE + SOURCES.format(own=""))
    notes = import_config([str(tmp_path / "a.toml")], kind=None, out=None)[1]
    (said,) = [str(note) for note in notes if note.path == ("trainer", "loss", "type")]
    assert "`default` is taken" in said and 'type = "ipo"' in said and "October 2026" in said
    (tmp_path / "a.toml").write_text(BASE + SOURCES.format(own="") + '[trainer.loss]\ntype = "ipo"\n')
    notes = import_config([str(tmp_path / "a.toml")], kind=None, out=None)[1]
    assert all(note.path != ("trainer", "loss", "type") for note in notes)


def test_retries_and_timeouts_of_sources_are_notes(tmp_path: Path) -> None:
    own = "retries = { rollout = 2 }\ntimeout = 60"
    loaded = read(tmp_path, SOURCES.format(own=own) + f"[[orchestrator.eval.source]]\nenv.taskset.id = 'a'\n{own}\n")
    said = [str(note) for note in loaded.notes]
    for key in ("env[1].retries", "env[1].timeout", "eval.env[0].retries", "eval.env[0].timeout"):
        assert any(f"orchestrator.{key}" in each for each in said), said
