"""Keys of TRL are known by the names that they have here."""

import pytest

from millrace.config import RLConfig, SFTConfig, messages
from millrace.config.load import load
from millrace.config.prime_rl.translation import kind_of
from millrace.config.tree import dotted, schema_tree
from millrace.errors import InvalidSpecError


def test_every_key_that_is_named_is_there():
    rl = {dotted(key.path) for key in schema_tree(RLConfig).walk()}
    assert {key for keys, _ in messages.TRL_RL.values() for key in keys} <= rl
    sft = schema_tree(SFTConfig)
    for name in ("per_device_train_batch_size", "learning_rate", "max_length", "num_train_epochs", "packing"):
        assert messages.trl_meaning(name, sft), name
    assert messages.trl_meaning("num_generations", sft) is None, "SFT has no groups"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("per_device_train_batch_size", "`orchestrator.batch_size` (the rollouts of a whole step"),
        ("num_generations", "`orchestrator.rollouts_per_example`?"),
        ("max-completion-length", "`orchestrator.sampling.max_tokens`?"),
        ("beta", "`trainer.loss.kl.coef`"),
        ("epsilon", "`trainer.loss.clip_low` and `trainer.loss.clip_high`"),
        ("num_train_epochs", "`max_steps` (in steps"),
        ("trainer.optim.learning-rate", "`trainer.optim.lr`?"),
    ],
)
def test_did_you_mean(name: str, meant: str):
    with pytest.raises(InvalidSpecError) as caught:
        load(RLConfig, [f"--{name}", "3"], {})
    (found,) = [each for each in caught.value.violations if "TRL" in each.message]
    assert f"did you mean {meant}" in found.message


def test_a_file_of_trl_is_one_of_a_run():
    assert kind_of({"num_generations": 8, "learning_rate": 1e-6}, "grpo.toml") == "rl"
    assert kind_of({"beta": 8}, "x.toml") is None
