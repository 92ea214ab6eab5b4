"""SFT: rows, tokens, order, and a fine-tuning that lowers the loss and can be continued."""

import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from millrace.config.sections.sft import SFTConfig, SFTDataConfig
from millrace.errors import CapacityError, InvalidSpecError, NotFoundError, UnavailableError
from millrace.models.vocabulary import load_tokenizer
from millrace.policies.tensors import TensorBytes
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.sft.checkpoints import replace_directory, try_to_save, write_directory
from millrace.trainer.sft.data import Order, RowEncoder
from millrace.trainer.sft.fine_tune import SFTStep, load_config, run_sft
from millrace.trainer.sft.rows import load_rows


@pytest.fixture(scope="module")
def tokenizer(example: Path) -> Any:
    return load_tokenizer(example / "base")


def test_the_example_model_is_the_documented_one(example: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(example / "base")
    assert sum(p.numel() for p in model.parameters()) == 124_288
    assert len(tokenizer) == 259 and tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
    text = "vo povi é"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(text)["input_ids"]) == len(text.encode())


@pytest.mark.computes
def test_the_warm_up_never_sees_a_held_out_text(example: Path) -> None:
    import reverse_text

    environment = reverse_text.load_environment()
    held_out = set(environment.eval_dataset["question"])
    prompts = [json.loads(line)["prompt"] for line in (example / "sft.jsonl").read_text().splitlines()]
    assert len(held_out) == 64 and len(prompts) == 2000
    assert not held_out & set(prompts)
    assert set(prompts) == set(environment.dataset["question"])


def test_loss_is_on_the_completion_and_its_stop_token_only(tokenizer: Any) -> None:
    sample = RowEncoder(tokenizer, seq_len=64).encode({"prompt": "toma", "completion": "amot"})
    assert sample is not None and sample.ce_weights is not None
    assert (
        tokenizer.decode(sample.token_ids) == "<|im_start|>user\ntoma<|im_end|>\n<|im_start|>assistant\namot<|im_end|>"
    )
    assert tokenizer.decode(sample.token_ids[sample.ce_weights == 1]) == "amot<|im_end|>"
    assert not sample.loss_mask.any()


def test_messages_and_text_give_the_same_sample(tokenizer: Any) -> None:
    encoder = RowEncoder(tokenizer, seq_len=64)
    messages = {
        "prompt": [{"role": "user", "content": "toma"}],
        "completion": [{"role": "assistant", "content": "amot"}],
    }
    assert encoder.encode(messages) == encoder.encode({"prompt": "toma", "completion": "amot"})


def test_long_rows_are_cut_and_rows_without_a_completion_left_are_dropped(tokenizer: Any) -> None:
    row = {"prompt": "toma", "completion": "a" * 20}
    full = RowEncoder(tokenizer, seq_len=64).encode(row)
    cut = RowEncoder(tokenizer, seq_len=30).encode(row)
    assert full is not None and cut is not None and cut.ce_weights is not None
    assert cut.num_tokens == 30 and np.array_equal(cut.token_ids, full.token_ids[:30])
    assert RowEncoder(tokenizer, seq_len=10).encode(row) is None


def test_without_a_chat_template_texts_are_joined(example: Path) -> None:
    plain = load_tokenizer(example / "base")
    plain.chat_template = None
    sample = RowEncoder(plain, seq_len=64).encode({"prompt": "ab", "completion": "ba"})
    assert sample is not None and sample.ce_weights is not None
    assert plain.decode(sample.token_ids) == "abba<|im_end|>"
    assert sample.ce_weights.tolist() == [0, 0, 1, 1, 1]
    with pytest.raises(InvalidSpecError, match="no chat template"):
        RowEncoder(plain, seq_len=64).encode({"prompt": [], "completion": []})


def test_every_pass_takes_every_row_once_in_a_new_order() -> None:
    order = Order(10, batch_size=4, shuffle=True, seed=3)
    taken = [row for step in range(5) for row in order.rows_of(step)]
    first, second = taken[:10], taken[10:]
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert order.steps_per_pass == 3
    assert order.rows_of(1) == Order(10, batch_size=4, shuffle=True, seed=3).rows_of(1)
    assert Order(10, batch_size=4, shuffle=False, seed=3).rows_of(2) == [8, 9, 0, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting"),
        ('{"prompt": "a"}', "completion"),
        ('{"prompt": "a", "completion": []}', "both"),
        ("3", "JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' + line + "\n")
    with pytest.raises(InvalidSpecError, match=message) as raised:
        load_rows(SFTDataConfig(name=str(path)))
    assert raised.value.violations[0].source == f"{path}:2"


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"nothing\.jsonl.*data\.name"):
        load_rows(SFTDataConfig(name=str(tmp_path / "nothing.jsonl")))
    with pytest.raises(NotFoundError, match="no rows"):
        load_rows(SFTDataConfig(name=str(tmp_path)))


def _config(example: Path, output: Path, **changes: Any) -> SFTConfig:
    document: dict[str, Any] = {
        "model": {"name": str(example / "base")},
        "data": {"name": str(example / "sft.jsonl"), "batch_size": 16, "seq_len": 64},
        "optim": {"lr": 4e-3},
        "max_steps": 8,
        "output_dir": str(output),
        "run": {"name": "sft"},
    }
    return SFTConfig.model_validate({**document, **changes})


def test_fine_tuning_lowers_the_loss_and_writes_a_model_that_loads(example: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    steps: list[SFTStep] = []
    directory = run_sft(_config(example, tmp_path), gang=Gang(), on_step=steps.append)
    assert directory == tmp_path / "sft" / "model"
    assert [step.step for step in steps] == list(range(8))
    assert steps[-1].loss < 0.8 * steps[0].loss
    lines = [json.loads(line) for line in (tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss/mean"] for line in lines] == [step.loss for step in steps]
    tuned = AutoModelForCausalLM.from_pretrained(directory)
    base = AutoModelForCausalLM.from_pretrained(example / "base")
    assert not torch.equal(tuned.model.embed_tokens.weight, base.model.embed_tokens.weight)
    assert AutoTokenizer.from_pretrained(directory).chat_template == load_tokenizer(example / "base").chat_template
    assert not (tmp_path / "sft" / "checkpoints").exists()


def test_the_saved_model_names_the_end_of_turns_that_was_trained(example: Path, tmp_path: Path) -> None:
    """As of a base checkpoint: its texts end with another token than the turns of its chat template."""
    base = tmp_path / "base"
    shutil.copytree(example / "base", base)
    tokenizer = load_tokenizer(base)
    end, turn = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(base)
    for name in ("config.json", "generation_config.json"):
        document = json.loads((base / name).read_text()) if (base / name).exists() else {}
        (base / name).write_text(json.dumps({**document, "eos_token_id": end}))
    config = _config(example, tmp_path, model={"name": str(base)}, max_steps=1)
    saved = run_sft(config, gang=Gang(), on_step=lambda _: None)
    assert json.loads((saved / "generation_config.json").read_text())["eos_token_id"] == sorted([end, turn])


@pytest.mark.computes
def test_an_interrupted_fine_tuning_continues_bit_for_bit(example: Path, tmp_path: Path) -> None:
    config = _config(example, tmp_path / "broken", ckpt={"interval": 4})
    whole = run_sft(_config(example, tmp_path / "whole", ckpt={"interval": 4}), gang=Gang(), on_step=lambda _: None)

    def interrupt(step: SFTStep) -> None:
        if step.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sft(config, gang=Gang(), on_step=interrupt)
    steps: list[SFTStep] = []
    broken = run_sft(config, gang=Gang(), on_step=steps.append)
    assert [step.step for step in steps] == [4, 5, 6, 7]
    assert (broken / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    lines = [
        json.loads(line)["step"] for line in (tmp_path / "broken" / "sft" / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines == list(range(8))


@pytest.mark.parametrize("max_steps", [None, 1])
def test_nothing_to_train_on_is_an_error_before_the_first_step(
    example: Path, tmp_path: Path, max_steps: int | None
) -> None:
    data = {"name": str(example / "sft.jsonl"), "batch_size": 16, "seq_len": 8}
    steps: list[SFTStep] = []
    with pytest.raises(
        InvalidSpecError, match=r"data\.seq_len.*no completion token.*set data\.seq_len to \d+"
    ) as raised:
        run_sft(_config(example, tmp_path, data=data, max_steps=max_steps), gang=Gang(), on_step=steps.append)
    assert raised.value.exit_code == 2 and raised.value.violations[0].field == "data.seq_len"
    assert not steps and not (tmp_path / "sft").exists()


def test_rows_without_any_completion_are_named_as_such(tokenizer: Any) -> None:
    row = {"prompt": [{"role": "user", "content": "a"}], "completion": []}
    encoder = RowEncoder(tokenizer, seq_len=64)
    with pytest.raises(InvalidSpecError, match="none of 3 rows has a completion token") as raised:
        encoder.require_completion([(row, "")] * 3)
    assert raised.value.violations[0].field == "data.name"


def test_only_the_rows_that_will_be_taken_are_looked_at() -> None:
    order = Order(10, batch_size=4, shuffle=True, seed=3)
    assert list(order.first_pass(max_steps=2)) == [*order.rows_of(0), *order.rows_of(1)]
    assert sorted(order.first_pass(max_steps=9)) == list(range(10))


def test_cut_and_dropped_rows_are_counted_and_warned_of(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [("a", "b"), ("a", "b" * 40), ("a" * 60, "b"), ("a", "b")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in rows))
    data = {"name": str(path), "batch_size": 2, "seq_len": 40, "shuffle": False}
    run_sft(_config(example, tmp_path, data=data, max_steps=2), gang=Gang(), on_step=lambda _: None)
    counts = [(r.rows, r.cut, r.dropped) for r in caplog.records if "data.seq_len" in r.getMessage()]  # type: ignore[attr-defined]
    assert counts == [(2, 1, 0), (4, 1, 1)]
    caplog.clear()
    run_sft(_config(example, tmp_path, max_steps=2), gang=Gang(), on_step=lambda _: None)
    assert not [record for record in caplog.records if "data.seq_len" in record.getMessage()]


def test_a_directory_is_replaced_and_kept_if_it_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, fresh = tmp_path / "model", tmp_path / ".model.new"
    for directory, text in ((target, "old"), (fresh, "new")):
        directory.mkdir()
        (directory / "x").write_text(text)
    rename = Path.rename

    def refuse(self: Path, other: Path) -> Path:
        assert all(path.exists() for path in (fresh, target) if path != other)  # nothing is deleted before the end
        if self == fresh:
            raise PermissionError("no")
        return rename(self, other)

    with monkeypatch.context() as patch, pytest.raises(PermissionError):
        patch.setattr(Path, "rename", refuse)
        replace_directory(fresh, target)
    assert (target / "x").read_text() == "old"
    replace_directory(fresh, target)
    assert (target / "x").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_bad_config_file_is_reported_whole(tmp_path: Path) -> None:
    path = tmp_path / "sft.json"
    path.write_text('{"max_steps": 0, "optim": {"lr": -1.0}}')
    with pytest.raises(InvalidSpecError) as raised:
        load_config(path)
    assert {violation.field for violation in raised.value.violations} == {"max_steps", "optim.lr"}
    with pytest.raises(NotFoundError, match=r"none\.json"):
        load_config(tmp_path / "none.json")


def test_no_more_than_one_tensor_is_in_memory_while_a_model_is_saved(tmp_path: Path) -> None:
    held: list[weakref.ref[np.ndarray]] = []
    most = 0

    def gathered() -> Iterator[tuple[str, TensorBytes]]:
        nonlocal most
        for number in range(4):
            array = np.full((2, 3), number, np.float32)
            held.append(weakref.ref(array))
            tensor = TensorBytes.from_numpy(array)
            del array
            most = max(most, sum(each() is not None for each in held))
            yield f"layer.{number}", tensor
            del tensor

    described = [(f"layer.{number}", "float32", (2, 3)) for number in range(4)]
    written = write_directory(
        tmp_path / "model", {"config.json": b"{}"}, weights="w", described=described, tensors=gathered(), gang=Gang()
    )
    assert most == 1
    assert {path.name for path in written.iterdir()} == {"config.json", "w"} and len(list(tmp_path.iterdir())) == 1
    found = safetensors.torch.load((written / "w").read_bytes())
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        f"layer.{number}": [[number] * 3] * 2 for number in range(4)
    }


def test_what_cannot_be_saved_is_known_before_the_first_step(example: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = _config(example, tmp_path / "file" / "outputs")
    with pytest.raises(UnavailableError, match="Not a directory") as raised:
        run_sft(config, gang=Gang(), on_step=lambda _: pytest.fail("a step was made"))
    assert raised.value.reason == "DIRECTORY_UNUSABLE" and str(tmp_path / "file") in str(raised.value)
    target = tmp_path / "model"
    try_to_save({"config.json": b"{}", "additional_chat_templates/a.jinja": b"x"}, target=target, num_bytes=1)
    with pytest.raises(CapacityError, match="and the model takes") as full:
        try_to_save({}, target=target, num_bytes=2**62)
    assert full.value.reason == "DISK_FULL" and [each.name for each in tmp_path.iterdir()] == ["file"]


def test_room_for_a_checkpoint_is_asked_for_before_the_first_step(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_bytes = sum(path.stat().st_size for path in (example / "base").glob("*.safetensors"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2 * model_bytes))
    config = _config(example, tmp_path, ckpt={"interval": 4})
    with pytest.raises(CapacityError, match="a checkpoint and the model take") as full:
        run_sft(config, gang=Gang(), on_step=lambda _: pytest.fail("a step was made"))
    assert full.value.reason == "DISK_FULL" and str(tmp_path) in str(full.value)
