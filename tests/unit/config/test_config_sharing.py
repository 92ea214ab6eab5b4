import pytest

from millrace.config import RLConfig, validate_document
from millrace.config.load import load

ENV = {"env": [{"id": "a"}], "rollouts_per_example": 2}


def test_shared_keys_fill_the_services():
    config = RLConfig.model_validate(
        {
            "model": {"name": "m"},
            "max_steps": 7,
            "seq_len": 99,
            "seed": 5,
            "async_level": 3,
            "ckpt": {"interval": 2},
            "orchestrator": ENV,
        }
    )
    assert {config.trainer.model.name, config.orchestrator.model.name, config.inference.model.name} == {"m"}
    assert (config.trainer.max_steps, config.orchestrator.max_steps) == (7, 7)
    assert (config.trainer.model.seq_len, config.orchestrator.seq_len) == (99, 99)
    assert (config.orchestrator.seed, config.orchestrator.async_level) == (5, 3)
    assert config.trainer.ckpt is not None and config.trainer.ckpt.interval == 2


def test_services_fill_the_shared_keys():
    config = RLConfig.model_validate(
        {
            "trainer": {"max_steps": 7, "model": {"name": "m", "seq_len": 50}, "ckpt": {}},
            "orchestrator": {**ENV, "seq_len": 50, "seed": 4, "async_level": 0},
        }
    )
    assert (config.max_steps, config.orchestrator.max_steps) == (7, 7)
    assert config.model.name == config.inference.model.name == "m"
    assert (config.seq_len, config.seed, config.async_level) == (50, 4, 0)
    assert config.ckpt is not None


def test_different_seq_lens_leave_the_shared_one_empty():
    config = RLConfig.model_validate({"trainer": {"model": {"seq_len": 4096}}, "orchestrator": ENV})
    assert (config.seq_len, config.trainer.model.seq_len, config.orchestrator.seq_len) == (None, 4096, 2048)


def test_equal_values_may_be_written_twice():
    document = {"max_steps": 7, "trainer": {"max_steps": 7}, "ckpt": {"interval": 1}, "orchestrator": ENV}
    document["trainer"]["ckpt"] = {"keep_last": 2}
    config = validate_document(document)
    assert config.ckpt == config.trainer.ckpt
    assert config.ckpt is not None and (config.ckpt.interval, config.ckpt.keep_last) == (1, 2)


def test_every_conflict_is_listed(violations, tmp_path):
    (tmp_path / "a.toml").write_text(
        "max_steps = 5\nseq_len = 64\n[ckpt]\ninterval = 1\n"
        '[trainer]\nmax_steps = 6\n[trainer.ckpt]\ninterval = 2\n[trainer.model]\nname = "x"\nseq_len = 65\n'
        '[inference.model]\nname = "y"\n'
    )
    found = violations("@", "a.toml")
    assert {violation.field for violation in found} == {"max_steps", "seq_len", "ckpt.interval", "trainer.model.name"}
    messages = {violation.field: str(violation) for violation in found}
    assert "`trainer.max_steps` is 6 (a.toml:6)" in messages["max_steps"]
    assert "[a.toml:1]" in messages["max_steps"]
    assert '`inference.model.name` is "y" (a.toml:13)' in messages["trainer.model.name"]
    assert "set one of them only" in messages["seq_len"]


def test_switching_off_at_the_top_conflicts_with_a_service(violations):
    (found,) = violations("--no-ckpt", "--trainer.ckpt.interval", "3")
    assert found.field == "ckpt" and "trainer.ckpt" in found.message


def test_filling_does_not_change_what_is_given():
    document = {"max_steps": 7, "orchestrator": {**ENV, "eval": {}}}
    validate_document(document)
    RLConfig.model_validate(document)
    assert document == {"max_steps": 7, "orchestrator": {**ENV, "eval": {}}}


@pytest.mark.parametrize("key", ["max_steps", "seed", "async_level"])
def test_a_wrong_shared_value_is_reported_once(violations, key):
    found = violations(f"--{key}", "x")
    assert [violation.field for violation in found] == [key]


def test_another_model_is_another_model_for_every_service():
    config = RLConfig.model_validate(
        {"trainer": {"model": {"name": "a"}}, "orchestrator": {**ENV, "eval": {}}, "ckpt": {}}
    )
    other = config.with_model("/b")
    assert {section.model.name for section in (other, other.trainer, other.orchestrator, other.inference)} == {"/b"}
    assert other.with_model("a") == config


SPLIT = ("--trainer", "@", "trainer.toml", "--orchestrator", "@", "orchestrator.toml")


@pytest.fixture
def split(tmp_path):
    (tmp_path / "trainer.toml").write_text('max_steps = 60\n[model]\nname = "a"\nseq_len = 64\n[ckpt]\ninterval = 9\n')
    (tmp_path / "orchestrator.toml").write_text('max_steps = 60\nseq_len = 64\nasync_level = 1\n[model]\nname = "a"\n')
    return tmp_path


def test_a_shared_flag_overrules_the_services_files(split, load_rl):
    flags = ("--max-steps", "3", "--seq-len", "32", "--async-level", "2", "--model.name", "b", "--ckpt.interval", "4")
    found = load_rl(*SPLIT, *flags).config
    assert (found.max_steps, found.trainer.max_steps, found.orchestrator.max_steps) == (3, 3, 3)
    assert (found.trainer.model.seq_len, found.orchestrator.seq_len) == (32, 32)
    assert (found.orchestrator.async_level, found.trainer.model.name, found.trainer.ckpt.interval) == (2, "b", 4)
    assert load_rl(*SPLIT, "--no-ckpt").config.trainer.ckpt is None


def test_flags_for_all_services_overrule_a_shared_key_of_a_file(tmp_path, load_rl, violations):
    (tmp_path / "rl.toml").write_text("max_steps = 60\nasync_level = 1\n")
    both = ("--trainer.max-steps", "3", "--orchestrator.max-steps", "3", "--orchestrator.async-level", "0")
    found = load_rl("@", "rl.toml", *both).config
    assert (found.max_steps, found.async_level) == (3, 0)
    (alone,) = violations("@", "rl.toml", "--trainer.max-steps", "3")
    assert alone.field == "max_steps" and "give --max-steps, which overrules files" in alone.message


def test_equally_strong_contradictions_stay_errors(split, violations):
    (split / "top.toml").write_text("max_steps = 5\n")
    (found,) = violations(*SPLIT, "@", "top.toml")
    assert found.field == "max_steps" and "trainer.max_steps" in found.message


def test_a_file_overrules_the_environment(tmp_path):
    (tmp_path / "rl.toml").write_text("max_steps = 60\n")
    flags = ["@", "rl.toml", "--orchestrator.env", '[{"id": "a"}]', "--orchestrator.rollouts-per-example", "2"]
    found = load(RLConfig, flags, {"MILLRACE_CONFIG__trainer__max_steps": "7"}, cwd=tmp_path)
    assert found.config.trainer.max_steps == 60 and "trainer.max_steps" not in found.sources
