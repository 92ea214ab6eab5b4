import pytest

from millrace.config import RLConfig, validate_document

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
