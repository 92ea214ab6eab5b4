"""`--bench` of the trainer: the samples that it takes, the steps that it times, and the table that it prints."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from millrace.cli.main import main
from millrace.cli.session.bench import flags, is_bench, trainer_bench
from millrace.config.sections.rl import FakeDataConfig, TrainerBench
from millrace.config.sections.trainer import TrainerConfig
from millrace.errors import InvalidSpecError
from millrace.models.routing import Routers
from millrace.trainer.bench import BenchStep, fake_samples, lines, measure, summary
from millrace.trainer.gang.distributed import Gang
from millrace_testing.trainer.families import make_named


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=64, num_attention_heads=2, num_key_value_heads=1, **shape)).save_pretrained(
        path
    )
    return path


def bench_of(directory: Path, **keys: Any) -> TrainerBench:
    return TrainerBench.model_validate(
        {
            "trainer": {
                "model": {"name": str(directory), "seq_len": 64},
                "micro_batch_tokens": 128,
                "peak_tflops": 0.1,
            },
            "data": {"batch_size": 4, "seq_len": 64, "type": "variable"},
            "steps": 3,
            **keys,
        }
    )


def test_lengths_are_those_that_were_asked_for_and_the_same_again():
    fixed = fake_samples(FakeDataConfig(batch_size=5, seq_len=40), step=0, seed=0, vocabulary=64)
    assert [len(sample.token_ids) for sample in fixed] == [40] * 5
    data = FakeDataConfig(type="variable", batch_size=200, seq_len=100)
    variable = fake_samples(data, step=3, seed=1, vocabulary=64)
    lengths = [len(sample.token_ids) for sample in variable]
    assert min(lengths) >= 10 and max(lengths) <= 100 and 45 < sum(lengths) / 200 < 65
    again = fake_samples(data, step=3, seed=1, vocabulary=64)
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(variable, again, strict=True))
    assert lengths != [len(sample.token_ids) for sample in fake_samples(data, step=4, seed=1, vocabulary=64)]
    assert max(sample.token_ids.max() for sample in variable) < 64


@pytest.mark.parametrize("is_sft", [False, True])
def test_steps_learn_and_are_timed_by_phase(directory: Path, is_sft: bool):
    bench, heard = bench_of(directory, is_sft=is_sft), list[BenchStep]()
    gang = Gang()
    steps = measure(bench, gang=gang, on_step=heard.append)
    gang.leave()
    assert [step.step for step in heard] == [0, 1, 2, 3] and steps == heard[1:]
    assert all(step.forward_s > 0 and step.backward_s > 0 and step.optimizer_s > 0 for step in steps)
    assert all(step.mfu is not None and 0 < step.mfu < 1 for step in steps)
    assert all(step.num_tokens == sum(len(s.token_ids) for s in _samples(bench, step.step)) for step in steps)
    found = summary(steps, num_ranks=1, peak_bytes=steps[-1].peak_bytes)
    table = "\n".join(lines(bench, found))
    assert all(word in table for word in ("tokens/s", "MFU", "peak memory", "forward", "backward", "optimizer"))
    assert found["peak_bytes"] > 2**20


def test_a_mixture_is_measured_with_the_experts_of_its_tokens(tmp_path: Path):
    bench = bench_of(make_named("qwen3_moe", tmp_path))
    bench = bench.model_copy(
        update={"trainer": TrainerConfig.model_validate(bench.trainer.model_dump() | _replaying(bench)), "steps": 1}
    )
    gang, given, steps = Gang(), list[int](), list[BenchStep]()
    give = Routers.give

    def counted(routers: Routers, experts_TXK: torch.Tensor | None) -> None:
        given.append(0 if experts_TXK is None else int((experts_TXK[:, 0, 0] >= 0).sum()))
        give(routers, experts_TXK)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Routers, "give", counted)
        measure(bench, gang=gang, on_step=steps.append)
    gang.leave()
    # Every token but the last of each of 4 samples, in the step that warms up, too.
    assert len(steps) == 2 and sum(given) == sum(step.num_tokens - 4 for step in steps)


def _replaying(bench: TrainerBench) -> dict[str, Any]:
    model = bench.trainer.model.model_dump()
    return {"model": model | {"moe": model["moe"] | {"replay": True}}}


def _samples(bench: TrainerBench, step: int) -> list[Any]:
    return fake_samples(bench.data, step=step, seed=bench.seed, vocabulary=64)


def test_flags_become_the_document_and_all_that_is_wrong_is_said_at_once(directory: Path):
    trainer = TrainerConfig.model_validate({"model": {"name": str(directory)}})
    given = {
        "bench": True,
        "data.fake.type": "variable",
        "data.fake.batch-size": "8",
        "data.fake.seq-len": "128",
        "data.fake.micro-batch-size": "4",
        "bench.steps": "2",
    }
    assert is_bench(given) and set(given) == set(flags())
    bench = trainer_bench(trainer, given)
    assert (bench.data.type, bench.data.batch_size, bench.data.seq_len, bench.steps) == ("variable", 8, 128, 2)
    assert (bench.trainer.model.seq_len, bench.trainer.micro_batch_tokens) == (128, 512)
    with pytest.raises(InvalidSpecError) as caught:
        trainer_bench(trainer, {"bench": True, "data.fake.type": "x", "data.fake.seq-len": "1", "bench.steps": "-1"})
    assert len(caught.value.violations) == 3
    with pytest.raises(InvalidSpecError, match="is a flag of --bench"):
        is_bench({"data.fake.type": "fixed"})


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("orchestrator --bench", "name a config file"),
        ("env-server --bench", "does not measure the env-server alone"),
        ("inference --model.name m --bench --inference.engine vllm", "vllm bench throughput"),
        ("trainer --data.fake.seq-len 128", "is a flag of --bench"),
        ("sft --model.name m --bench.steps 3", "is a flag of --bench"),
        (
            'run submit --model.name m --orchestrator.env [{"id":"a"}] --orchestrator.rollouts-per-example 2 '
            "--orchestrator.batch-size 4 --bench",
            "millrace run submit has no --bench",
        ),
    ],
)
def test_what_is_not_measured_is_refused_with_a_sentence(
    command: str, sentence: str, capsys: pytest.CaptureFixture[str]
):
    assert main(command.split()) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.long
def test_a_gang_measures_together(directory: Path, tmp_path: Path):
    command = [sys.executable, "-m", "millrace.cli.main", "sft", "--model.name", str(directory), "--bench"]
    command += ["--nproc-per-node", "2", "--data.batch-size", "4", "--data.seq-len", "32", "--bench.steps", "1"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout and "tokens/s per rank" in done.stdout
    (path,) = (tmp_path / "outputs").glob("bench-*/bench.json")
    assert json.loads(path.read_text())["summary"]["ranks"] == 2
