import json
import subprocess
import sys

import pytest
from pydantic import ValidationError

from millrace.config import RLConfig, SFTConfig, run_hash, validate_document
from millrace.config.tree import Kind, schema_tree
from millrace.errors import InvalidSpecError

DOCUMENT = {"orchestrator": {"env": [{"id": "reverse-text"}], "rollouts_per_example": 16}}


def test_defaults_are_those_of_prime_rl():
    config = RLConfig.model_validate(DOCUMENT)
    assert config.model.name == config.trainer.model.name == config.inference.model.name == "Qwen/Qwen3-0.6B"
    assert (config.trainer.optim.lr, config.trainer.optim.weight_decay, config.trainer.optim.max_norm) == (
        1e-6,
        0.01,
        1,
    )
    assert (config.trainer.optim.betas1, config.trainer.optim.betas2) == (0.9, 0.999)
    loss = config.trainer.loss
    assert (loss.dppo_mask_low, loss.dppo_mask_high, loss.adv_tau, loss.kl_tau) == (0.2, 0.2, 1.0, 1e-3)
    assert (config.orchestrator.batch_size, config.orchestrator.max_off_policy_steps) == (128, 8)
    assert config.orchestrator.seq_len == config.trainer.model.seq_len == config.seq_len == 2048
    assert config.orchestrator.sampling.temperature == 1.0
    assert config.orchestrator.eval is None and config.ckpt is None and config.max_steps is None
    evaluated = RLConfig.model_validate({"orchestrator": {**DOCUMENT["orchestrator"], "eval": {}}}).orchestrator.eval
    assert evaluated is not None
    assert (evaluated.num_examples, evaluated.rollouts_per_example, evaluated.interval) == (-1, 1, 100)


@pytest.mark.parametrize(
    ("written", "ramps"),
    [
        ({}, (0, 0)),
        ({"type": "constant", "warmup_steps": 5}, (5, 0)),
        ({"type": "linear"}, (10, 10)),
        ({"type": "linear", "decay_steps": 1}, (10, 1)),
        ({"type": "cosine"}, (10, 0)),
    ],
)
def test_ramps_follow_the_schedule(written: dict, ramps: tuple[int, int]):
    document = {**DOCUMENT, "max_steps": 30, "trainer": {"scheduler": written}}
    scheduler = RLConfig.model_validate(document).trainer.scheduler
    assert (scheduler.warmup_steps, scheduler.decay_steps) == ramps


def test_evaluation_takes_what_is_left_out_from_training():
    document = {
        "orchestrator": {
            "rollouts_per_example": 2,
            "env": [{"id": "a", "args": {"x": 1}, "weight": 2.0}, {"id": "a", "name": "b"}],
            "sampling": {"temperature": 0.7, "max_tokens": 5},
            "eval": {"sampling": {"temperature": 0.0}},
        }
    }
    evaluation = RLConfig.model_validate(document).orchestrator.eval
    assert evaluation is not None
    assert (evaluation.sampling.temperature, evaluation.sampling.max_tokens) == (0.0, 5)
    assert [(env.id, env.name, env.args) for env in evaluation.env] == [("a", "a", {"x": 1}), ("a", "b", {})]


def test_micro_batch_has_room_for_one_sample():
    assert RLConfig.model_validate({**DOCUMENT, "seq_len": 16384}).trainer.micro_batch_tokens == 16384
    assert RLConfig.model_validate({**DOCUMENT, "seq_len": 64}).trainer.micro_batch_tokens == 8192
    assert SFTConfig.model_validate({"data": {"seq_len": 10000}}).micro_batch_tokens == 10000


def test_sft_data_seed_is_the_run_seed():
    assert SFTConfig.model_validate({"seed": 3}).data.seed == 3
    assert SFTConfig.model_validate({"seed": 3, "data": {"seed": 4}}).data.seed == 4


@pytest.mark.parametrize(
    "config",
    [
        RLConfig.model_validate(
            {
                "max_steps": 20,
                "ckpt": {"interval": 5},
                "wandb": {"tags": ["a"]},
                "orchestrator": {**DOCUMENT["orchestrator"], "eval": {}, "sampling": {"extra_body": {"top_k": 5}}},
            }
        ),
        RLConfig.model_validate({**DOCUMENT, "trainer": {"model": {"seq_len": 4096}}}),
        SFTConfig.model_validate({"scheduler": {"type": "linear"}, "max_steps": 20}),
    ],
    ids=["rl", "different seq_len", "sft"],
)
def test_resolved_json_loads_as_the_same_config(config: RLConfig | SFTConfig):
    text = config.resolved_json()
    again = type(config).model_validate_json(text)
    assert again == config and again.resolved_json() == text
    checked = validate_document(text, type(config))
    assert checked == config
    assert list(json.loads(text)) == sorted(json.loads(text))


def test_run_hash_covers_every_value():
    one = RLConfig.model_validate(DOCUMENT)
    other = RLConfig.model_validate({**DOCUMENT, "seed": 1})
    assert run_hash(one.resolved_json()) == run_hash(RLConfig.model_validate(DOCUMENT).resolved_json())
    assert run_hash(one.resolved_json()) != run_hash(other.resolved_json())
    assert len(run_hash(one.resolved_json())) == 64


def test_configs_cannot_be_changed():
    with pytest.raises(ValidationError):
        RLConfig.model_validate(DOCUMENT).trainer.optim.lr = 1.0  # type: ignore[misc]


def test_direct_construction_checks_the_rules_too():
    with pytest.raises(ValidationError, match="must be a multiple of"):
        RLConfig.model_validate({"orchestrator": {**DOCUMENT["orchestrator"], "batch_size": 100}})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_without_a_json_form_are_refused(value: float):
    document = {"orchestrator": {**DOCUMENT["orchestrator"], "env": [{"id": "a", "args": {"x": [value]}}]}}
    with pytest.raises(InvalidSpecError, match=r"orchestrator\.env\[0\]\.args"):
        validate_document(document)
    with pytest.raises(InvalidSpecError, match="finite"):
        validate_document({**DOCUMENT, "trainer": {"optim": {"lr": value}}})


@pytest.mark.parametrize("model", [RLConfig, SFTConfig])
def test_every_key_is_described(model: type[RLConfig] | type[SFTConfig]):
    for node in schema_tree(model).walk():
        assert node.description.endswith((".", ")")), f"{node.path} has no description in sentences"
        if node.kind in (Kind.SECTION, Kind.SECTION_LIST):
            assert node.children


def test_importing_the_config_stays_light():
    program = (
        "import sys, millrace.config; "
        "print([m for m in ('torch', 'grpc', 'numpy', 'google.protobuf', 'verifiers') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "[]"
