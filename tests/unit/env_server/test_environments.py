"""Our own environments: deterministic, disjoint sets, rewards as documented."""

from typing import Any

import code_lookup
import pytest
import reverse_text


def questions(dataset: Any) -> list[str]:
    return list(dataset["question"])


def test_reverse_text_sets_are_disjoint_and_deterministic() -> None:
    env = reverse_text.load_environment(num_train=300, num_eval=50, seed=3)
    train, held_out = questions(env.get_dataset()), questions(env.get_eval_dataset())
    assert len(set(train)) == 300 and len(set(held_out)) == 50 and not set(train) & set(held_out)
    assert all(4 <= len(text) <= 8 and text == text.strip() for text in train + held_out)
    again = reverse_text.load_environment(num_train=300, num_eval=50, seed=3)
    assert questions(again.get_dataset()) == train and questions(again.get_eval_dataset()) == held_out
    assert questions(reverse_text.load_environment(num_train=10, num_eval=50, seed=3).get_eval_dataset()) == held_out
    assert questions(reverse_text.load_environment(num_train=300, num_eval=50, seed=4).get_dataset()) != train


def test_reverse_text_prompt_is_the_text_alone() -> None:
    row = reverse_text.load_environment(num_train=2, num_eval=1).get_dataset()[0]
    assert row["prompt"] == [{"role": "user", "content": row["question"]}]
    assert row["answer"] == row["question"][::-1]


@pytest.mark.parametrize(
    ("reply", "reward"), [("otam", 1.0), ("otam \n", 1.0), (" otam", 8 / 9), ("", 0.0), (None, 0.0), ("zzzz", 0.0)]
)
def test_reverse_text_reward(reply: str | None, reward: float) -> None:
    completion = [{"role": "assistant", "content": reply}]
    assert reverse_text.reverse_similarity(completion, "otam") == pytest.approx(reward)


def test_reverse_text_refuses_empty_sets() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        reverse_text.load_environment(num_eval=0)


def test_code_lookup_sets_are_disjoint_and_codes_depend_on_the_task() -> None:
    env = code_lookup.load_environment(num_train=200, num_eval=40)
    train, held_out = env.get_dataset(), env.get_eval_dataset()
    assert not set(questions(train)) & set(questions(held_out))
    for row in [*train, *held_out]:
        codes = dict(pair.split("=") for pair in row["info"]["codes"].split())
        assert codes[row["question"][-1]] == row["answer"] and set(codes) == set(row["question"])
    # Without the tool the code is a guess: the same last letter has many codes.
    assert len({row["answer"] for row in train if row["question"].endswith("a")}) > 20


def said(*replies: str) -> list[dict[str, str]]:
    turns = [[{"role": "assistant", "content": reply}, {"role": "user", "content": "ku"}] for reply in replies]
    return [message for pair in turns for message in pair][:-1]


@pytest.mark.parametrize(("call", "reward"), [("a", 1.0), ("t", 0.25), ("x", 0.0), ("ta", 0.0), ("", 0.0)])
def test_code_lookup_call(call: str, reward: float) -> None:
    state = {"prompt": [{"role": "user", "content": "toma"}]}
    assert code_lookup.called_tool(said(call, "ku"), state) == reward


def test_code_lookup_code() -> None:
    assert code_lookup.repeated_code(said("a", "ku"), "ku") == 1.0
    assert code_lookup.repeated_code(said("a", "ke"), "ku") == 0.5
    assert code_lookup.repeated_code(said("ku"), "ku") == 0.0


async def test_code_lookup_tool() -> None:
    env = code_lookup.load_environment(num_train=1, num_eval=1)
    state: Any = {"info": {"codes": "a=ku t=zo"}}
    for call, answer in (("a", "ku"), (" t ", "zo"), ("x", "?"), ("", "?")):
        [message] = await env.env_response([{"role": "assistant", "content": call}], state)
        assert message["content"] == answer
