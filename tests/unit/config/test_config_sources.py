import json
import textwrap
import tomllib
from pathlib import Path

import pytest

from millrace.config import RLConfig, SFTConfig, load
from millrace.config.files import toml_lines
from millrace.config.tree import Kind, SchemaKey, schema_tree

BASE = """
max_steps = 10

[trainer.optim]
lr = 1e-3
betas2 = 0.95

[orchestrator]
rollouts_per_example = 4
batch_size = 8

[[orchestrator.env]]
id = "a"

[[orchestrator.env]]
id = "b"
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    return path


def test_command_line_beats_files_beat_environment_beat_defaults(load_rl, base):
    env = {"MILLRACE_CONFIG__trainer__optim__lr": "0.5", "MILLRACE_CONFIG__trainer__optim__weight_decay": "0.25"}
    loaded = load_rl("@", "base.toml", "--max-steps", "3", env=env, minimal=False)
    optim = loaded.config.trainer.optim
    assert loaded.config.max_steps == loaded.config.trainer.max_steps == 3
    assert (optim.lr, optim.weight_decay, optim.betas2, optim.betas1) == (1e-3, 0.25, 0.95, 0.9)
    assert loaded.sources["max_steps"] == "command line (--max-steps)"
    assert loaded.sources["trainer.optim.lr"] == "base.toml:5"
    assert loaded.sources["trainer.optim.weight_decay"] == "MILLRACE_CONFIG__trainer__optim__weight_decay"
    assert "trainer.optim.betas1" not in loaded.sources
    assert loaded.files == ("base.toml",)


def test_later_files_win_and_lists_are_replaced(load_rl, base, tmp_path):
    (tmp_path / "more.toml").write_text('[trainer.optim]\nlr = 1.0\n[[orchestrator.env]]\nid = "c"\n')
    config = load_rl("@base.toml", "@", "more.toml", minimal=False).config
    assert (config.trainer.optim.lr, config.trainer.optim.betas2) == (1.0, 0.95)
    assert [env.id for env in config.orchestrator.env] == ["c"]
    assert load_rl("@more.toml", "@base.toml", minimal=False).config.trainer.optim.lr == 1e-3


def test_flags_win_even_in_front_of_a_file(load_rl, base):
    assert load_rl("--trainer.optim.lr", "7", "@", "base.toml", minimal=False).config.trainer.optim.lr == 7


def test_section_from_a_file(load_rl, tmp_path):
    (tmp_path / "optim.toml").write_text("lr = 2.0\n")
    loaded = load_rl("--trainer.optim", "@", "optim.toml", "--trainer.optim.betas1", "0.5")
    assert (loaded.config.trainer.optim.lr, loaded.config.trainer.optim.betas1) == (2.0, 0.5)
    assert loaded.sources["trainer.optim.lr"] == "optim.toml:1"
    assert load_rl("--trainer.optim", "@optim.toml").config.trainer.optim.lr == 2.0


def test_another_type_drops_the_fields_of_the_old_one(load_rl, tmp_path):
    (tmp_path / "linear.toml").write_text('max_steps = 30\n[trainer.scheduler]\ntype = "linear"\ndecay_steps = 5\n')
    scheduler = load_rl("@", "linear.toml", "--trainer.scheduler.type", "cosine").config.trainer.scheduler
    assert (scheduler.type, scheduler.warmup_steps, scheduler.decay_steps) == ("cosine", 10, 0)
    kept = load_rl("@", "linear.toml", "--trainer.scheduler.type", "linear").config.trainer.scheduler
    assert kept.decay_steps == 5


def test_json_files(load_rl, tmp_path):
    resolved = load_rl("--max-steps", "4", "--ckpt").config
    (tmp_path / "run.json").write_text(resolved.resolved_json())
    assert load_rl("@", "run.json", minimal=False).config == resolved


def test_environment_takes_upper_case_lists_and_free_tables(load_rl):
    env = {
        "MILLRACE_CONFIG__ORCHESTRATOR__ENV": '[{"id": "x"}]',
        "MILLRACE_CONFIG__ORCHESTRATOR__ROLLOUTS_PER_EXAMPLE": "2",
        "MILLRACE_CONFIG__ORCHESTRATOR__SAMPLING__EXTRA_BODY__Top_K": "5",
        "MILLRACE_CONFIG__CKPT": "{}",
        "MILLRACE_CONFIG__RUN__NAME": "7",
        "MILLRACE_OTHER": "ignored",
    }
    env["MILLRACE_CONFIG__RUN__NAME"] = "r7"
    config = load_rl(env=env, minimal=False).config
    assert config.orchestrator.sampling.extra_body == {"Top_K": 5}
    assert config.trainer.ckpt is not None and config.run.name == "r7"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("MILLRACE_CONFIG__trainer__optim__lrr", "1", "did you mean `trainer.optim.lr`"),
        ("MILLRACE_CONFIG__trainer__optim__lr", "fast", "must be a number"),
        ("MILLRACE_CONFIG__trainer____lr", "1", "is no key"),
        ("MILLRACE_CONFIG__orchestrator__env", "reverse-text", "JSON list"),
        ("MILLRACE_CONFIG__orchestrator__env__0__id", "a", "replaced as a whole"),
    ],
)
def test_wrong_variables_are_named(violations, name, value, says):
    minimal = ["--orchestrator.rollouts-per-example", "2", "--orchestrator.env", '[{"id": "a"}]']
    found = violations(*minimal, env={name: value}, minimal=False)
    assert [violation.source for violation in found] == [name]
    assert says in found[0].message


def _flat(value: object, node: SchemaKey, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """Return every leaf, list and free table of a resolved config as text."""
    if not (isinstance(value, dict) and node.kind is Kind.SECTION):
        return {path: value if isinstance(value, str) else json.dumps(value)}
    flat = {}
    for key, item in value.items():
        flat |= _flat(item, node.children[key], (*path, key))
    return flat


@pytest.mark.parametrize("way", ["flags", "environment"])
def test_a_whole_resolved_config_survives_flags_and_variables(load_rl, way):
    resolved = load_rl(
        *["--max-steps", "9", "--ckpt.interval", "2", "--orchestrator.eval", "--wandb.tags", '["a", "b"]'],
        *["--orchestrator.sampling.extra-body.top_k", "5", "--run.name", "x1", "--trainer.optim.lr", "1e-3"],
    ).config
    values = _flat(json.loads(resolved.resolved_json()), schema_tree(RLConfig))
    assert len(values) > 60
    if way == "flags":
        argv = [part for path, text in values.items() for part in (f"--{'.'.join(path).replace('_', '-')}", text)]
        assert load_rl(*argv, minimal=False).config == resolved
    else:
        env = {f"MILLRACE_CONFIG__{'__'.join(path)}": text for path, text in values.items()}
        assert load_rl(env=env, minimal=False).config == resolved


def test_sft_sources(tmp_path):
    (tmp_path / "sft.toml").write_text('[data]\nname = "a.jsonl"\nbatch_size = 4\n')
    loaded = load(SFTConfig, ["@", "sft.toml", "--data.batch-size", "8"], {}, cwd=tmp_path)
    assert (loaded.config.data.name, loaded.config.data.batch_size) == ("a.jsonl", 8)


def test_lines_of_all_forms_of_toml():
    text = textwrap.dedent('''\
        a = 1
        b.c = 2
        "d e" = """
        x = 9
        """ # end
        f = [
          "]", # ]
          {g = 1},
        ]
        [h."i.j"] # header
        k = 'x # "y'
        [[l]]
        m = 1
        [[l.n]]
        o = 1
        [[l]]
        m = "a\\"[" # quote
        [[l.n]]
        o = 2
        [l.p]
        q = {r = 1, s = [1, 2]}
        ''')
    tomllib.loads(text)
    lines = toml_lines(text)
    assert lines == {
        ("a",): 1,
        ("b",): 2,
        ("b", "c"): 2,
        ("d e",): 3,
        ("f",): 6,
        ("h", "i.j"): 10,
        ("h", "i.j", "k"): 11,
        ("l", 0): 12,
        ("l", 0, "m"): 13,
        ("l", 0, "n", 0): 14,
        ("l", 0, "n", 0, "o"): 15,
        ("l", 1): 16,
        ("l", 1, "m"): 17,
        ("l", 1, "n", 0): 18,
        ("l", 1, "n", 0, "o"): 19,
        ("l", 1, "p"): 20,
        ("l", 1, "p", "q"): 21,
    }
