"""`millrace rl` on a mixture of experts: its engine's experts are replayed, through a kill of the trainer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import unpack_batch
from millrace.telemetry.faults import VARIABLE, Fault, Point, arm
from millrace_testing.workplaces import EXAMPLES, Workplace

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LAYERS, EXPERTS, TOP_K, STEPS = 2, 16, 4, 5


def _make_mixture(workplace: Workplace) -> str:
    """Write an untrained Qwen3-MoE with the example's tokenizer; return its place in the workplace."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    workplace.run(str(EXAMPLES / "make_model.py"))
    tokenizer = AutoTokenizer.from_pretrained(workplace.path / "outputs/reverse-text/base")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=272,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.15,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    place = workplace.path / "outputs/mixture"
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return "outputs/mixture"


@pytest.fixture(scope="module")
def workplace(make_workplace: Any) -> Workplace:
    found = make_workplace("mixture")
    _make_mixture(found)
    return found


def _train(workplace: Workplace, name: str, *argv: str, env: dict[str, str] | None = None) -> tuple[Path, list[float]]:
    """Train the mixture in float32 beside an engine in bfloat16; return its run and the mismatch of each step."""
    summary, _ = workplace.train(
        *("--model.name", "outputs/mixture", "--name", name, "--max-steps", str(STEPS), "--ckpt.interval", "2"),
        *("--orchestrator.batch_size", "64", "--orchestrator.eval.num_examples", "4", "--async-level", "0"),
        *("--trainer.model.dtype", "float32", "--trainer.model.publish-dtype", "bfloat16"),
        *("--trainer.determinism", "strict", *argv),
        env=env or {},
        timeout_s=500,
    )
    assert summary["steps"] == STEPS
    lines = (workplace.path / summary["policy_path"]).with_name("metrics.jsonl").read_text().splitlines()
    metrics = [row["metrics"] for row in map(json.loads, lines) if row["kind"] == "step"]
    replayed = [step["replayed_tokens/mean"] for step in metrics]
    assert min(replayed) > 0.9, replayed
    return (workplace.path / summary["checkpoint_path"]).parents[1], [step["mismatch_kl/mean"] for step in metrics]


REPLAY = ("--trainer.model.moe.replay", "--inference.return-routed-experts")


def test_a_mixture_is_trained_with_its_engines_experts_through_a_kill(workplace: Workplace, tmp_path: Path) -> None:
    fired = arm(tmp_path, Fault(point=Point.TRAINER_MID_BACKWARD, when={"step": 3}))
    run, replayed = _train(workplace, "replayed", *REPLAY, env={VARIABLE: str(tmp_path)})
    assert fired.is_file(), "the trainer was killed in the backward of a step"
    assert np.mean(replayed) < 3e-4, "without replay it is 0.8e-3 to 2.3e-3 in these steps"

    headers = [batch_pb2.BatchHeader.FromString(path.read_bytes()) for path in sorted(run.glob("batches/*.pb"))]
    trained = [header for header in headers if header.kind == batch_pb2.BATCH_KIND_TRAIN]
    assert len(trained) == STEPS
    place = run.parents[2]
    for header in trained:
        chunks = {number: (place / chunk.key).read_bytes() for number, chunk in enumerate(header.chunks)}
        for sample in unpack_batch(header, chunks):
            experts = sample.routed_experts
            # All but the last token of a reply, in the layers that have experts.
            assert experts is not None and experts.shape == (sample.num_tokens - 1, LAYERS, TOP_K)
            assert experts.dtype == np.uint8 and experts.max() < EXPERTS
            assert all(len(set(chosen)) == TOP_K for chosen in experts.reshape(-1, TOP_K).tolist())

    store = ("--store", place.as_uri())
    workplace.millrace("run", "audit", run.name, "--deep", *store)
    for step in (3, STEPS):  # that of the kill, and one after it
        workplace.millrace("run", "replay", run.name, "--step", str(step), *store)  # fails unless every bit is equal


def test_a_dense_model_and_an_engine_that_records_nothing_are_refused(workplace: Workplace) -> None:
    argv = ("-m", "millrace.cli", "rl", "@", workplace.rl_toml, "--max-steps", "1")
    code, output = workplace.attempt(*argv, "--model.name", "outputs/mixture", "--trainer.model.moe.replay")
    assert code == 2 and "inference.return_routed_experts" in output, output
    code, output = workplace.attempt(*argv, "--model.name", "outputs/reverse-text/base", *REPLAY)
    assert code != 0 and "trainer.model.moe.replay" in output and "no routers" in output, output[-3000:]
