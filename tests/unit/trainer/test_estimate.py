"""The estimate of a run: memory by kind from fake tensors, the keys that bring it down, tokens/s, the command."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from millrace.cli.main import main
from millrace.config.sections.sft import SFTConfig
from millrace.config.sections.trainer import TrainerConfig
from millrace.trainer.estimate import estimate, trials
from millrace.trainer.estimate_report import KINDS
from millrace.trainer.estimate_step import Simulated, simulate, simulate_whole

pytestmark = pytest.mark.computes

MIB = 2**20


def model_config(*, blocks: int = 2, vocabulary: int = 512) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
    )


def moe_config(*, experts: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        moe_intermediate_size=32,
        num_experts=experts,
        num_experts_per_tok=2,
    )


def trainer(*, rows: int = 2, optim: dict[str, Any] | None = None, **model: Any) -> TrainerConfig:
    tree = {"model": {"name": "x", "seq_len": 64, **model}, "micro_batch_tokens": 64 * rows, "optim": optim or {}}
    return TrainerConfig.model_validate(tree)


@pytest.fixture(scope="module")
def plain() -> Simulated:
    return simulate(trainer(), model_config(), num_gpus=0)


def test_state_is_what_the_parameters_say(plain: Simulated):
    size = plain.num_parameters * 4
    assert plain.num_parameters == sum(p.numel() for p in _real().parameters())
    assert plain.learning["parameters"] == plain.learning["gradients"] == size
    assert 2 * size <= plain.learning["optimizer"] < 2 * size + 1000  # a count of steps for each parameter
    assert plain.learning["activations"] > 0 and plain.learning["logits"] > 0


def test_experts_that_are_given_to_routers_are_counted():
    free, given = (simulate(trainer(moe={"replay": on}), moe_config(experts=4), num_gpus=0) for on in (False, True))
    # 2 rows of 64 tokens, 1 layer, 2 experts of 2 bytes.
    assert given.learning["activations"] - free.learning["activations"] == 2 * 64 * 1 * 2 * 2
    assert given.num_parameters == free.num_parameters


@pytest.mark.long
def test_a_long_model_is_the_short_ones_and_arithmetic():
    config, whole = trainer(), model_config(blocks=8)
    assert simulate(config, whole, num_gpus=0) == simulate_whole(config, whole, num_gpus=0)


def test_each_key_brings_down_what_it_is_for(plain: Simulated):
    recomputed = simulate(trainer(ac={}), model_config(), num_gpus=0)
    adapters = simulate(trainer(lora={"rank": 4}), model_config(), num_gpus=0)
    half = simulate(trainer(rows=1), model_config(), num_gpus=0)
    assert recomputed.learning["activations"] < plain.learning["activations"]
    assert adapters.num_trained < adapters.num_parameters / 4
    assert adapters.learning["optimizer"] < plain.learning["optimizer"] / 4
    assert half.learning["activations"] < 0.6 * plain.learning["activations"]
    assert half.learning["optimizer"] == plain.learning["optimizer"]


def test_a_gang_shares_its_state_and_gathers_blocks(plain: Simulated):
    of_four = simulate(trainer(dtype="float32"), model_config(), num_gpus=4)
    quarter = plain.learning["parameters"] / 4
    assert quarter <= of_four.learning["parameters"] < quarter + 100  # FSDP has a few numbers of its own
    assert of_four.learning["gradients"] == plain.learning["gradients"] / 4
    assert of_four.learning["buffers"] > plain.learning["buffers"]
    offloaded = simulate(trainer(dtype="float32", fsdp_cpu_offload=True), model_config(), num_gpus=4)
    assert offloaded.device["optimizer"] == 0
    assert offloaded.host["optimizer"] == of_four.learning["optimizer"]


@pytest.fixture(scope="module")
def alone() -> Simulated:
    """Return one block on one GPU."""
    return simulate_whole(trainer(), model_config(blocks=1), num_gpus=1)


@pytest.mark.long
def test_ranks_of_tp_hold_parts_of_layers_and_the_whole_of_the_rest(alone: Simulated):
    of_two = simulate_whole(trainer(tp=2), model_config(blocks=1), num_gpus=2)
    attention, mlp = 2 * 64 * 64 + 2 * 64 * 32, 3 * 64 * 128  # queries and output, keys and values; gate, up, down
    held = 4 * (alone.num_parameters - (attention + mlp) // 2)
    assert of_two.num_parameters == alone.num_parameters
    assert held <= of_two.learning["parameters"] < held + 100
    assert of_two.learning["gradients"] == held
    assert 2 * held <= of_two.learning["optimizer"] < 2 * held + 1000
    assert of_two.learning["logits"] == alone.learning["logits"], "the head is whole at every rank"
    assert of_two.learning["activations"] < 0.75 * alone.learning["activations"]


@pytest.mark.long
def test_ranks_of_cp_hold_shares_of_the_state_and_a_part_of_each_row(alone: Simulated):
    sharded, of_two = (simulate_whole(trainer(cp=cp), model_config(blocks=1), num_gpus=2) for cp in (1, 2))
    assert sharded.learning["activations"] == alone.learning["activations"], "each of FSDP's ranks has whole rows"
    assert 0.5 * alone.learning["activations"] <= of_two.learning["activations"] < 0.6 * alone.learning["activations"]
    for kind in ("gradients", "buffers"):
        assert of_two.learning[kind] == sharded.learning[kind]
    assert of_two.learning["gradients"] == 2 * alone.num_parameters
    assert of_two.learning["logits"] < sharded.learning["logits"]


@pytest.mark.long
def test_ranks_of_ep_hold_their_experts_and_gather_no_others():
    experts, of_one = 8, 3 * 64 * 32  # gate, up, down
    sharded, of_ep = (simulate_whole(trainer(ep=ep), moe_config(experts=experts), num_gpus=2) for ep in (1, 2))
    assert of_ep.learning["gradients"] == sharded.learning["gradients"] == 2 * sharded.num_parameters
    # Of a block's experts only this rank's half is put together, in bfloat16, and so is their gradient.
    assert sharded.learning["buffers"] - of_ep.learning["buffers"] >= 2 * (experts // 2) * of_one


@pytest.mark.long
def test_experts_are_computed_in_float32_too():
    found = simulate_whole(trainer(), moe_config(experts=8), num_gpus=0)
    router, attention = 8 * 64, 2 * 64 * 64 + 2 * 64 * 32
    norms, head_and_embedding = 3 * 64 + 2 * 16, 2 * 512 * 64
    assert found.num_parameters == 8 * 3 * 64 * 32 + router + attention + norms + head_and_embedding
    assert found.learning["parameters"] == found.learning["gradients"] == 4 * found.num_parameters


def _real() -> Any:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM(model_config())


def fake_simulate(config: TrainerConfig, num_gpus: int) -> Simulated:
    """Return a step whose memory is easy to foresee."""
    size = 100 // max(num_gpus, 1)
    size -= 40 if config.model.lora else 0
    size -= 20 if config.model.ac else 0
    return Simulated(
        learning=dict.fromkeys(KINDS, 0) | {"activations": size},
        stepping=dict.fromkeys(KINDS, 0),
        elsewhere=frozenset(),
        num_parameters=1,
        num_trained=1,
        flops=None,  # pyright: ignore[reportArgumentType] - not asked for
        rows=1,
    )


@pytest.mark.parametrize(
    ("limit", "keys"),
    [
        (80, ('trainer.model.ac.mode = "selective"',)),
        (60, ("trainer.model.lora.rank = 16",)),
        (
            40,
            (
                'trainer.model.ac.mode = "full"',
                "trainer.model.reshard_after_forward = true",
                "trainer.model.fsdp_cpu_offload = true",
                "trainer.model.lora.rank = 16",
            ),
        ),
    ],
)
def test_the_first_change_that_fits_is_named(limit: int, keys: tuple[str, ...]):
    config = trainer(rows=1)
    tried = list(trials(config, num_gpus=1, limit=limit, simulate=fake_simulate, prefix="trainer."))
    assert [each.fits for each in tried] == [False] * (len(tried) - 1) + [True]
    assert tried[-1].keys == keys


def test_of_preference_pairs_the_reference_and_both_responses_are_counted():
    tree = {"model": {"name": "x"}, "data": {"name": "x", "seq_len": 64}, "micro_batch_tokens": 64}
    plain, pairs = (SFTConfig.model_validate(tree | extra).as_trainer() for extra in ({}, {"dpo": {}}))
    one, two = (simulate_whole(config, model_config(blocks=1), num_gpus=0) for config in (plain, pairs))
    assert two.learning["parameters"] == 2 * one.learning["parameters"]
    assert two.learning["optimizer"] == one.learning["optimizer"]
    assert (one.rows, two.rows) == (1, 2)


def test_a_micro_batch_of_pairs_is_made_no_smaller_than_a_pair():
    of_pairs = trials(trainer(rows=4), num_gpus=0, limit=0, simulate=fake_simulate, prefix="", is_paired=True)
    assert {key for each in islice(of_pairs, 3) for key in each.keys if "tokens" in key} == {"micro_batch_tokens = 128"}
    others = trials(trainer(rows=2), num_gpus=0, limit=0, simulate=fake_simulate, prefix="", is_paired=True)
    assert not [key for each in others for key in each.keys if "tokens" in key]


def test_more_gpus_come_last():
    tried = list(trials(trainer(rows=1), num_gpus=1, limit=0, simulate=fake_simulate, prefix=""))
    assert tried[-1].fits and tried[-1].keys[-1] == "--gpus 2"


def test_tokens_per_s_come_from_the_formula_of_the_trainers_mfu(tmp_path: Path):
    model_config().save_pretrained(tmp_path)
    config = trainer(name=str(tmp_path))
    found = estimate(config, num_gpus=0, gpu_memory=1, reserve=0, mfu=0.5, tflops=2)
    flops = simulate(config, model_config(), num_gpus=0).flops
    assert found.flops_per_token == flops.of_samples([64]) / 64
    assert found.tokens_per_s == pytest.approx(0.5 * 2e12 / found.flops_per_token)


def test_a_fine_tuning_on_pairs_is_estimated_as_it_is(tmp_path: Path):
    model_config(blocks=1).save_pretrained(tmp_path)
    tree = {"model": {"name": str(tmp_path)}, "data": {"name": "x", "seq_len": 64}, "micro_batch_tokens": 64}
    config = SFTConfig.model_validate(tree | {"dpo": {}})
    found = estimate(config, num_gpus=0, gpu_memory=1, reserve=0, mfu=0.5, tflops=None)
    assert (found.rows, found.seq_len) == (2, 64)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "rl.toml"
    orchestrator = "[orchestrator]\nbatch_size = 4\nrollouts_per_example = 2"
    file.write_text(f'seq_len = 64\n{orchestrator}\n[[orchestrator.env]]\nid = "reverse-text"\n')
    return file


def test_the_command_says_it_as_data(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model_config().save_pretrained(tmp_path / "model")
    words = ["--model.name", str(tmp_path / "model"), "--trainer.model.lora.rank", "4"]
    assert main(["estimate", "@", str(run_file), *words, "--gpus", "0", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["parameters"] > 0
    assert sum(found["bytes_per_rank"][kind] for kind in KINDS) == found["bytes_per_rank"]["peak"]


@pytest.mark.long  # a simulation for each of the changes
def test_what_does_not_fit_ends_with_1_and_says_what_was_tried(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model_config().save_pretrained(tmp_path / "model")
    words = ["--model.name", str(tmp_path / "model"), "--gpus", "0"]
    assert main(["estimate", "@", str(run_file), *words, "--gpu-memory", "0.003", "--reserve", "0"]) == 1
    out = capsys.readouterr().out
    assert "does not fit into 0.00 GiB" in out and "trainer.micro_batch_tokens = 64" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "some"], "--gpus"),
        (["--mfu", "40"], "--mfu"),
        (["--reserve", "81"], "--reserve"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    words: list[str], message: str, run_file: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["estimate", "@", str(run_file), "--model.name", "x", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_a_config_is_named(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["estimate", "@", str(run_file), "--model.name", str(tmp_path)]) != 0
    err = capsys.readouterr().err
    assert str(tmp_path) in err and "config.json" in err


def test_a_layout_that_the_model_does_not_fit_is_refused_with_all_that_is_wrong(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model_config().save_pretrained(tmp_path / "model")
    words = ["--model.name", str(tmp_path / "model"), "--trainer.model.tp", "3", "--trainer.model.ep", "2"]
    assert main(["estimate", "@", str(run_file), *words, "--gpus", "6"]) == 2
    err = capsys.readouterr().err
    assert "trainer.model.tp: num_attention_heads is 4" in err and "trainer.model.ep: the model has no experts" in err


@pytest.mark.parametrize("gpus", [1, 3])
def test_ranks_that_no_run_starts_with_are_refused(
    gpus: int, run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model_config().save_pretrained(tmp_path / "model")
    words = ["--model.name", str(tmp_path / "model"), "--trainer.model.dp_replicate", "2", "--gpus", str(gpus)]
    assert main(["estimate", "@", str(run_file), *words]) == 2
    assert f"{gpus} ranks cannot be laid out as dp_replicate 2" in capsys.readouterr().err
