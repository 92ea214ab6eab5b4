"""Which rows a step takes: mixing sources, passes, and full rows."""

import json
from pathlib import Path

import numpy as np
import pytest

from millrace.config.sections.data import DataSourceConfig
from millrace.config.sections.sft import SFTConfig
from millrace.errors import InvalidSpecError, NotFoundError
from millrace.rollouts.types import TrainSample
from millrace.trainer.sft.data import Order, mix, take_full, take_rows
from millrace.trainer.sft.rows import load_rows, load_sources


def test_sources_take_turns() -> None:
    both = mix([2, 4], probabilities=None, stop_at_first=False, seed=0)
    assert both.tolist() == [0, 2, 1, 3, 0, 4, 1, 5]  # the small one is repeated until the large one is over
    first = mix([2, 4], probabilities=None, stop_at_first=True, seed=0)
    assert first.tolist() == [0, 2, 1, 3]
    assert mix([3], probabilities=None, stop_at_first=False, seed=0).tolist() == [0, 1, 2]


def test_probabilities_are_shares_of_what_is_drawn() -> None:
    drawn = mix([4000, 4000], probabilities=[3, 1], stop_at_first=True, seed=1)
    share = float(np.mean(drawn < 4000))
    assert 0.72 < share < 0.78
    assert sorted(row for row in drawn if row < 4000) == list(range(4000))  # it ends with the last row of the first
    assert drawn[-1] == 3999
    again = mix([4000, 4000], probabilities=[3, 1], stop_at_first=True, seed=1)
    other = mix([4000, 4000], probabilities=[3, 1], stop_at_first=True, seed=2)
    assert np.array_equal(drawn, again) and not np.array_equal(drawn, other)


def test_all_exhausted_takes_every_row_of_every_source() -> None:
    drawn = mix([50, 20], probabilities=[0.5, 0.5], stop_at_first=False, seed=3)
    assert set(drawn.tolist()) == set(range(70)) and len(drawn) > 70


def test_passes_shuffle_the_mixed_rows_anew() -> None:
    order = Order(mix([2, 4], probabilities=None, stop_at_first=False, seed=0), batch_size=4, shuffle=True, seed=0)
    passes = [[order.row_at(at) for at in range(start, start + 8)] for start in (0, 8)]
    assert passes[0] != passes[1] and sorted(passes[0]) == sorted(passes[1]) == [0, 0, 1, 1, 2, 3, 4, 5]


def sample(length: int) -> TrainSample:
    zeros = np.zeros(length, np.float32)
    return TrainSample(
        token_ids=np.zeros(length, np.int32),
        loss_mask=np.zeros(length, np.uint8),
        inference_logprobs=zeros,
        advantages=zeros,
        ce_weights=zeros + 1,
        ordinal=0,
        member=0,
        attempt=0,
        env="sft",
        reward=0.0,
        temperature=1.0,
        min_version=0,
        max_version=0,
        lineage=0,
    )


def test_full_rows_hold_whole_samples_and_the_next_step_begins_with_the_first_that_does_not_fit() -> None:
    lengths = [6, 5, 4, 4, 3, 10, 1, 9, 2, 2]
    order = Order(len(lengths), batch_size=2, shuffle=False, seed=0)
    position, steps = 0, []
    while position < len(lengths):
        samples, position = take_full(order, lambda row: sample(lengths[row]), position, count=2, seq_len=10)
        steps.append([each.num_tokens for each in samples])
    assert steps == [[6, 5, 4, 4], [3, 10, 1], [9, 2, 2, 6]]  # the last one begins the next pass
    assert take_rows(order, lambda row: sample(lengths[row]), 8, count=4)[1] == 12


def test_rows_without_a_sample_end_a_step_that_would_never_be_full() -> None:
    order = Order(3, batch_size=2, shuffle=False, seed=0)
    samples, position = take_full(order, lambda row: None, 0, count=2, seq_len=4)
    assert samples == [] and position == 8


def write(path: Path, *prompts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": prompt, "completion": "x"}) + "\n" for prompt in prompts))


def test_subsets_and_splits_of_a_directory(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "t")
    write(tmp_path / "test.jsonl", "e", "f")
    write(tmp_path / "math" / "train.jsonl", "m")
    write(tmp_path / "math" / "extra.jsonl", "n")
    write(tmp_path / "code" / "test.jsonl", "c")

    def prompts(**keys: list[str]) -> list[list[str]]:
        sources = load_sources(DataSourceConfig(name=str(tmp_path), **keys))  # type: ignore[arg-type]
        return [[row["prompt"] for row in source.rows] for source in sources]

    assert prompts() == [["c", "n", "m", "e", "f", "t"]]
    assert prompts(splits=["train"]) == [["t"]]
    assert prompts(subsets=["math", "test"]) == [["n", "m"], ["e", "f"]]
    assert prompts(subsets=["math", "code"], splits=["train", "test"]) == [["m"], ["c"]]
    with pytest.raises(NotFoundError, match=r"code/train does not exist.*there are test.*data\.splits"):
        prompts(subsets=["code"], splits=["train"])
    with pytest.raises(NotFoundError, match=r"/law does not exist"):
        prompts(subsets=["law"])
    rows = load_rows(DataSourceConfig(name=str(tmp_path), splits=["train", "test"]))
    assert rows.place(2) == f"{tmp_path}/test.jsonl:2"


def test_a_subset_and_split_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, subset: str | None, *, split: str) -> list[dict[str, str]]:
        asked.append((name, subset, split))
        return [{"prompt": f"{subset}/{split}", "completion": "x"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    load_sources(DataSourceConfig(name="a/b", split="dev"))
    load_sources(DataSourceConfig(name="a/b", subsets=["s"]))
    sources = load_sources(DataSourceConfig(name="a/b", subsets=["s", "t"], splits=["x", "y"]))
    assert asked == [("a/b", None, "dev"), ("a/b", "s", "train"), ("a/b", "s", "x"), ("a/b", "t", "y")]
    assert sources[1].place(0) == "a/b, subset 't', split 'y', row 0"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": {"a": 1}}, "`messages` that are no list"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\].*role"),
        ({"messages": [], "tools": "{"}, "`tools` is text that is no JSON"),
        ({"messages": [], "tools": {"a": 1}}, "`tools` must be a list"),
        ({"messages": [], "chat_template_kwargs": "[1]"}, "`chat_template_kwargs` must be an object"),
        ({"messages": [], "chat_template_kwargs": {"tokenize": False}}, "may not set `tokenize`"),
    ],
)
def test_a_row_of_another_kind_is_named_by_its_line(tmp_path: Path, row: dict[str, object], message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(InvalidSpecError, match=message) as raised:
        load_rows(DataSourceConfig(name=str(path)))
    assert raised.value.violations[0].source == f"{path}:1"


def test_messages_may_stand_beside_a_prompt_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}) + "\n")
    assert load_rows(DataSourceConfig(name=str(path))).place(0).startswith(str(path))


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"subsets": ["a", "b"], "splits": ["c"]}, "data.splits"),
        ({"subsets": ["a", "b"], "probabilities": [1.0]}, "data.probabilities"),
        ({"probabilities": [0.5, 0.5]}, "data.probabilities"),
        ({"subsets": ["a"], "probabilities": [0.0]}, "above 0"),
        ({"subsets": []}, "at least one"),
        ({"loss_mask": {"assistant": False}}, "no role"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(data: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        SFTConfig.model_validate({"data": data})
