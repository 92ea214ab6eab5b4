"""Fine-tunings that are continued, validated, packed, or train adapters only."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.config.sections.sft import SFTConfig
from millrace.errors import InvalidSpecError, InvalidStateError
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.sft.fine_tune import SFTStep, run_sft

pytestmark = pytest.mark.computes


def make_config(example: Path, output: Path, **changes: Any) -> SFTConfig:
    document: dict[str, Any] = {
        "model": {"name": str(example / "base")},
        "data": {"name": str(example / "sft.jsonl"), "batch_size": 8, "seq_len": 64},
        "optim": {"lr": 4e-3},
        "max_steps": 4,
        "output_dir": str(output),
        "run": {"name": "sft"},
        "ckpt": {"interval": 2},
    }
    return SFTConfig.model_validate({**document, **changes})


def steps_of(config: SFTConfig) -> list[int]:
    steps: list[SFTStep] = []
    run_sft(config, gang=Gang(), on_step=steps.append)
    return [step.step for step in steps]


def lines_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "sft" / "metrics.jsonl").read_text().splitlines()]


def weights(output: Path, name: str = "model") -> bytes:
    return (output / "sft" / name / "model.safetensors").read_bytes()


def test_more_steps_continue_the_run_and_give_what_one_run_gives(example: Path, tmp_path: Path) -> None:
    assert steps_of(make_config(example, tmp_path / "two", max_steps=4)) == [0, 1, 2, 3]
    longer = {"max_steps": 6, "ckpt": {"interval": 3, "keep_last": 1}, "micro_batch_tokens": 8000}
    assert steps_of(make_config(example, tmp_path / "two", **longer)) == [4, 5]
    assert steps_of(make_config(example, tmp_path / "one", max_steps=6, peak_tflops=0.5)) == list(range(6))
    assert weights(tmp_path / "two") == weights(tmp_path / "one")
    assert [line["step"] for line in lines_of(tmp_path / "two")] == list(range(6))
    for line in lines_of(tmp_path / "one"):
        assert line["perf/throughput"] == pytest.approx(line["progress/tokens"] / line["time/step"])
        assert line["perf/throughput_per_gpu"] == line["perf/throughput"] and 0 < line["perf/mfu"] < 1
    assert not any("perf/mfu" in line for line in lines_of(tmp_path / "two")), "nothing says what the device could do"
    with pytest.raises(InvalidSpecError, match=r"max_steps.* is less than the 6 steps that the run has made"):
        steps_of(make_config(example, tmp_path / "two", max_steps=5))


def test_it_goes_on_from_the_newest_step_only(example: Path, tmp_path: Path) -> None:
    steps_of(make_config(example, tmp_path))
    with pytest.raises(InvalidSpecError, match=r"ckpt.resume_step.* is not that of the newest checkpoint, 4"):
        steps_of(make_config(example, tmp_path, max_steps=5, ckpt={"interval": 2, "resume_step": 2}))
    assert steps_of(make_config(example, tmp_path, max_steps=5, ckpt={"interval": 2, "resume_step": 4})) == [4]
    assert steps_of(make_config(example, tmp_path, max_steps=6, ckpt={"interval": 2, "resume_step": -1})) == [5]


def test_a_moved_run_goes_on(example: Path, tmp_path: Path) -> None:
    steps_of(make_config(example, tmp_path / "a"))
    (tmp_path / "a").rename(tmp_path / "b")
    assert steps_of(make_config(example, tmp_path / "b", max_steps=5)) == [4]


@pytest.mark.parametrize(
    ("changes", "key", "values"),
    [
        ({"optim": {"lr": 1e-3}}, "optim.lr", ("0.001", "0.004")),
        ({"seed": 7}, "seed", ("7", "0")),
        ({"model": {"lora": {"rank": 2}}}, "model.lora.rank", ("2", "null")),
    ],
)
def test_another_training_is_refused_by_the_key(
    example: Path, tmp_path: Path, changes: dict[str, Any], key: str, values: tuple[str, str]
) -> None:
    steps_of(make_config(example, tmp_path, max_steps=2))
    model = weights(tmp_path)
    if "model" in changes:
        changes = {"model": {**changes["model"], "name": str(example / "base")}}
    with pytest.raises(InvalidSpecError, match=r"another run\.name") as raised:
        steps_of(make_config(example, tmp_path, max_steps=4, **changes))
    found = {violation.field: violation for violation in raised.value.violations}
    assert key in found and found[key].value == values[0] and f"was {values[1]} in" in found[key].message
    assert not set(found) & {"max_steps", "run.name"} and weights(tmp_path) == model


def test_rows_that_were_added_make_another_training(example: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    data = {"name": str(path), "batch_size": 4, "seq_len": 64}
    steps_of(make_config(example, tmp_path, data=data, max_steps=2))
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 10)
    with pytest.raises(InvalidSpecError, match=r"the rows of each source.*was \[9\]"):
        steps_of(make_config(example, tmp_path, data=data, max_steps=4))
    path.write_text('{"prompt": "a", "completion": "c"}\n' * 9)
    with pytest.raises(InvalidSpecError, match=r"the SHA-256 of the rows.*which makes it another training"):
        steps_of(make_config(example, tmp_path, data=data, max_steps=4))
    path.write_text('{"completion": "b", "prompt": "a"}\n' * 9)
    assert steps_of(make_config(example, tmp_path, data=data, max_steps=4)) == [2, 3], "the same rows, written anew"


def test_a_step_whose_rows_are_all_left_out_takes_the_next_ones(example: Path, tmp_path: Path) -> None:
    """An optimizer step on nothing would still move the weights: momentum, weight decay."""
    path = tmp_path / "rows.jsonl"
    good = [{"prompt": "a", "completion": f"b{number}"} for number in range(8)]
    long = [{"prompt": "a" * 200, "completion": "b"}] * 4
    data = {"name": str(path), "batch_size": 4, "seq_len": 64, "shuffle": False}
    path.write_text("".join(f"{json.dumps(row)}\n" for row in [*good[:4], *long, *good[4:]]))
    assert steps_of(make_config(example, tmp_path / "with", data=data, max_steps=2)) == [0, 1]
    once = make_config(example, tmp_path / "pass", data=data, max_steps=None)
    assert steps_of(once) == [0, 1], "one pass: no row is trained on twice because others are left out"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in good))
    assert steps_of(make_config(example, tmp_path / "without", data=data, max_steps=2)) == [0, 1]
    assert weights(tmp_path / "with") == weights(tmp_path / "without")


def make_broken(example: Path, target: Path) -> Path:
    """Return a start model with weights so large that no gradient is finite: every step is skipped."""
    model = AutoModelForCausalLM.from_pretrained(example / "base")
    with torch.no_grad():
        model.model.norm.weight.fill_(1e25)
    model.save_pretrained(target)
    for file in (example / "base").iterdir():
        if not (target / file.name).exists():
            shutil.copy(file, target / file.name)
    return target


def test_gradients_that_are_never_finite_end_the_run(example: Path, tmp_path: Path) -> None:
    make_broken(example, tmp_path / "broken")
    with pytest.raises(InvalidStateError, match=r"gradients of the 2 steps up to step 1 were not finite") as raised:
        steps_of(make_config(example, tmp_path, model={"name": str(tmp_path / "broken")}, max_skipped_steps=2))
    assert raised.value.reason == "TOO_MANY_SKIPPED_STEPS"
    assert [line["optim/skipped"] for line in lines_of(tmp_path)] == [1, 1], "what happened can be seen"


def test_steps_that_were_skipped_count_across_a_restart(example: Path, tmp_path: Path) -> None:
    model = {"name": str(make_broken(example, tmp_path / "broken"))}
    assert steps_of(make_config(example, tmp_path, model=model, max_skipped_steps=3, max_steps=2)) == [0, 1]
    with pytest.raises(InvalidStateError, match=r"gradients of the 3 steps up to step 2 were not finite"):
        steps_of(make_config(example, tmp_path, model=model, max_skipped_steps=3, max_steps=4))


def test_a_run_that_saved_nothing_yet_may_change(example: Path, tmp_path: Path) -> None:
    def interrupt(_: SFTStep) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sft(make_config(example, tmp_path), gang=Gang(), on_step=interrupt)
    assert steps_of(make_config(example, tmp_path, optim={"lr": 1e-3})) == [0, 1, 2, 3]


def test_validation_is_at_the_interval_and_at_the_end(example: Path, tmp_path: Path) -> None:
    rows = (example / "sft.jsonl").read_text().splitlines()
    (tmp_path / "val.jsonl").write_text("\n".join(rows[:50]) + "\n")
    val = {"interval": 2, "eval_on_start": True, "data": {"name": str(tmp_path / "val.jsonl")}}
    steps_of(make_config(example, tmp_path, val=val, optim={"lr": 1e-2}))
    losses = {line["step"]: line["val/loss"] for line in lines_of(tmp_path) if "val/loss" in line}
    assert list(losses) == [0, 2, 4] and losses[4] < losses[2] < losses[0]
    assert "loss/mean" not in lines_of(tmp_path)[-1]
    # Validation changes nothing of the training, and its own loss is that of a step over the same rows.
    steps_of(make_config(example, tmp_path / "without", optim={"lr": 1e-2}))
    assert weights(tmp_path) == weights(tmp_path / "without")
    data = {"name": str(tmp_path / "val.jsonl"), "batch_size": 50, "seq_len": 64}
    steps_of(make_config(example, tmp_path / "rows", data=data, max_steps=1))
    assert lines_of(tmp_path / "rows")[0]["loss/mean"] == pytest.approx(losses[0], rel=1e-6)


def val_loss(example: Path, output: Path, **data: Any) -> float:
    """Return the loss of the start model on the rows of `output`'s parent, under these keys of `val.data`."""
    val = {"interval": 9, "eval_on_start": True, "data": {"name": str(output.parent / "rows"), **data}}
    steps_of(make_config(example, output, val=val, max_steps=1, ckpt=None))
    return next(line["val/loss"] for line in lines_of(output))


def step_loss(example: Path, output: Path, *, rows: list[str], **data: Any) -> float:
    """Return the loss of the first step, which takes all of these rows."""
    output.mkdir()
    (output / "rows.jsonl").write_text("\n".join(rows) + "\n")
    data = {"name": str(output / "rows.jsonl"), "batch_size": len(rows), "seq_len": 64, **data}
    steps_of(make_config(example, output, data=data, max_steps=1, ckpt=None))
    return lines_of(output)[0]["loss/mean"]


def test_validation_has_a_length_roles_and_a_mixture_of_its_own(example: Path, tmp_path: Path) -> None:
    rows = (example / "sft.jsonl").read_text().splitlines()
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text("\n".join(rows[:2]) + "\n")
    (tmp_path / "rows" / "b.jsonl").write_text("\n".join(rows[2:7]) + "\n")
    both = {"subsets": ["a", "b"]}
    same = val_loss(example, tmp_path / "same", **both)
    assert same == pytest.approx(step_loss(example, tmp_path / "once", rows=rows[:7]), rel=1e-6)
    cut = val_loss(example, tmp_path / "cut", seq_len=30)
    assert cut == pytest.approx(step_loss(example, tmp_path / "short", rows=rows[:7], seq_len=30), rel=1e-6) != same
    mask = {"user": True, "assistant": False}
    asked = val_loss(example, tmp_path / "asked", loss_mask=mask)
    assert asked == pytest.approx(step_loss(example, tmp_path / "user", rows=rows[:7], loss_mask=mask), rel=1e-6)
    turns = val_loss(example, tmp_path / "turns", **both, stopping_strategy="first_exhausted")
    assert turns == pytest.approx(step_loss(example, tmp_path / "four", rows=rows[:4]), rel=1e-6)
    drawn = [val_loss(example, tmp_path / f"drawn{at}", **both, probabilities=[1, 9], seed=at) for at in (0, 0, 5)]
    assert drawn[0] == drawn[1] != drawn[2] != same
    with pytest.raises(InvalidSpecError, match=r"set val\.data\.seq_len to \d+ to cut no row"):
        val_loss(example, tmp_path / "nothing", seq_len=3)


def test_packed_steps_take_as_much_as_fits_and_continue_where_they_were(example: Path, tmp_path: Path) -> None:
    data = {"name": str(example / "sft.jsonl"), "batch_size": 4, "seq_len": 128, "pack_function": "cat"}
    steps_of(make_config(example, tmp_path / "one", data=data))
    tokens = [line["progress/tokens"] for line in lines_of(tmp_path / "one")]
    assert all(0.75 * 4 * 128 < count <= 4 * 128 for count in tokens)
    steps_of(make_config(example, tmp_path / "two", data=data, max_steps=2))
    assert steps_of(make_config(example, tmp_path / "two", data=data)) == [2, 3]
    assert weights(tmp_path / "two") == weights(tmp_path / "one")


def test_packing_without_a_number_of_steps_ends_with_the_data(example: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join((example / "sft.jsonl").read_text().splitlines()[:40]) + "\n")
    data = {"name": str(path), "batch_size": 2, "seq_len": 128, "pack_function": "cat"}
    steps: list[SFTStep] = []
    run_sft(make_config(example, tmp_path, data=data, max_steps=None), gang=Gang(), on_step=steps.append)
    tokens = sum(step.num_tokens for step in steps)
    assert steps[-1].num_steps == len(steps) and len(steps) >= tokens / 256
    one = make_config(example, tmp_path / "one", data={**data, "batch_size": 40, "pack_function": "stack"}, max_steps=1)
    steps_of(one)
    of_the_rows = lines_of(tmp_path / "one")[0]["progress/tokens"]
    assert of_the_rows <= tokens < of_the_rows + 256  # the last step is filled from the next pass


def test_adapters_alone_are_trained_and_are_merged_into_the_model(example: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = {"name": str(example / "base"), "lora": {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}}
    keys = {"model": model, "optim": {"lr": 1e-2}}
    steps_of(make_config(example, tmp_path, **keys, max_steps=2))
    assert steps_of(make_config(example, tmp_path, **keys)) == [2, 3]
    steps_of(make_config(example, tmp_path / "one", **keys))
    assert weights(tmp_path) == weights(tmp_path / "one")
    losses = [line["loss/mean"] for line in lines_of(tmp_path)]
    assert losses[-1] < losses[0]

    base = AutoModelForCausalLM.from_pretrained(example / "base").state_dict()
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "sft" / "model").state_dict()
    adapter = load_file(tmp_path / "sft" / "adapter" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "sft" / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["target_modules"] == ["q_proj", "v_proj"]
    assert config["base_model_name_or_path"] == str((example / "base").resolve())
    whole = {path.name for path in (tmp_path / "sft" / "model").iterdir()} - {"config.json", "model.safetensors"}
    beside = {path.name for path in (tmp_path / "sft" / "adapter").iterdir()}
    assert beside == whole | {"adapter_config.json", "adapter_model.safetensors"}
    stops = [GenerationConfig.from_pretrained(tmp_path / "sft" / each).eos_token_id for each in ("adapter", "model")]
    assert stops[0] == stops[1] is not None
    assert AutoTokenizer.from_pretrained(tmp_path / "sft" / "adapter").chat_template is not None
    assert base.keys() == tuned.keys()
    for name in base:
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in adapter:
            change = 2.0 * adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]
            assert change.abs().max() > 0
            torch.testing.assert_close(tuned[name], base[name] + change)
        else:
            assert torch.equal(tuned[name], base[name])


def test_an_adapter_that_cannot_be_merged_is_refused(example: Path, tmp_path: Path) -> None:
    model = {"name": str(example / "base"), "lora": {"target_modules": ["lm_head"]}}
    with pytest.raises(InvalidStateError, match=r"lm_head, whose weight is tied"):
        steps_of(make_config(example, tmp_path, model=model))


def test_metrics_that_a_kill_has_torn_do_not_stop_the_resume(example: Path, tmp_path: Path) -> None:
    steps_of(make_config(example, tmp_path))
    path = tmp_path / "sft" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "lo')
    assert steps_of(make_config(example, tmp_path, max_steps=6)) == [4, 5]
    assert [line["step"] for line in lines_of(tmp_path)] == list(range(6)), "nothing is missing or there twice"


def test_a_run_that_goes_on_says_behind_which_step(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    steps_of(make_config(example, tmp_path))
    assert not any("fine-tuning" in message for message in caplog.messages), "it began, and was never broken off"
    shutil.rmtree(tmp_path / "sft" / "checkpoints" / str(4), ignore_errors=True)
    newest = max((tmp_path / "sft" / "checkpoints").rglob("manifest.json"), key=lambda path: str(path.parent))
    newest.unlink()
    steps_of(make_config(example, tmp_path, max_steps=6))
    assert (
        "fine-tuning continues after step 2 (checkpoint 2): the run had ended after step 4, and steps 3 to 4 are made "
        "again" in caplog.messages
    )
    steps_of(make_config(example, tmp_path / "none", ckpt=None))
    steps_of(make_config(example, tmp_path / "none", ckpt=None))
    assert any("begins at step 1 again, without a checkpoint (the config has no [ckpt])" in m for m in caplog.messages)
