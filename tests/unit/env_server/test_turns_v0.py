"""What is trained of v0 steps that the library has cut at `max_seq_len` of their environment."""

from types import SimpleNamespace
from typing import Any

import pytest

from millrace.env_server.adapters.client_v0 import LeanClient
from millrace.env_server.adapters.samples import MissingTokensError, SpanLog, merge_turns
from millrace.env_server.adapters.samples_v0 import turns_of
from millrace.env_server.own_sampling import AskedSampling
from millrace.internal.v1.play_pb2 import EnvSpec, Sampling
from millrace.rollouts.types import PolicySpan

ASKED = AskedSampling(EnvSpec(id="talk"), Sampling(temperature=1.0))
LOG = SpanLog()


def span(start: int, end: int, version: int = 3) -> PolicySpan:
    return PolicySpan(lineage=0, version=version, start=start, end=end)


def step(prompt: list[int], sampled: list[int], *, limit: int | None = None, reward: Any = None) -> dict[str, Any]:
    """Return a step as the library records it: `limit` cuts its tokens, and the answer keeps all of them."""
    whole = SimpleNamespace(prompt_ids=prompt, completion_ids=sampled)
    room = len(sampled) if limit is None else max(0, limit - len(prompt))
    tokens = {"prompt_ids": prompt[:limit], "completion_ids": sampled[:room]}
    tokens["is_truncated"] = limit is not None and len(prompt) + len(sampled) > limit
    tokens["completion_logprobs"] = [-0.5] * len(tokens["completion_ids"])
    LOG.note("r", sampled, (span(0, 1), span(1, len(sampled), 4)), None)
    return {"tokens": tokens, "response": SimpleNamespace(message=SimpleNamespace(tokens=whole)), "reward": reward}


def turns(*steps: dict[str, Any]) -> Any:
    return turns_of(steps, LOG.take("r"), ASKED)


def test_a_step_that_was_not_cut_is_as_it_was() -> None:
    found = turns(step([1, 2], [3, 4, 5]))
    assert (found.num_cut, found.why_cut, found.are_all_cut) == (0, "", False)
    [sample] = merge_turns(found.kept, requires_spans=True)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5]


def test_what_is_left_of_a_completion_is_trained_with_the_versions_behind_it() -> None:
    found = turns(step([1, 2], [3, 4, 5, 6], limit=4))
    assert found.num_cut == 2 and not found.are_all_cut
    [sample] = merge_turns(found.kept, requires_spans=True)
    assert sample.token_ids.tolist() == [1, 2, 3, 4] and sample.loss_mask.sum() == 2
    assert [(each.version, each.end - each.start) for each in sample.policy_spans] == [(3, 1), (4, 1)]


def test_a_turn_of_which_nothing_is_left_is_not_trained_and_its_reward_counts_for_the_turn_before() -> None:
    first, second = step([1, 2], [3, 4], limit=5, reward=0.25), step([1, 2, 3, 4, 5, 6], [7, 8], limit=5, reward=0.5)
    found = turns(first, second)
    assert found.num_cut == 2 and not found.are_all_cut
    [sample] = merge_turns(found.kept, requires_spans=True)
    assert sample.token_ids.tolist() == [1, 2, 3, 4]
    assert [turn.reward for turn in sample.turns] == [0.75], "the turns still add up to the rollout's reward"


@pytest.mark.parametrize("limit", [2, 3])
def test_a_rollout_of_which_nothing_is_left_says_whose_limit_that_is(limit: int) -> None:
    found = turns(step([1, 2, 3], [4, 5], limit=limit))
    assert found.are_all_cut and found.num_cut == 2
    assert f"prompt of model call 0 has 3 tokens and the environment's `max_seq_len` is {limit}" in found.why_cut


def test_a_turn_whose_tokens_its_environment_takes_out_is_not_trained() -> None:
    hidden = step([1, 2], [3, 4])
    hidden["tokens"] |= {"completion_ids": [], "completion_logprobs": []}
    found = turns(hidden, step([1, 2, 3, 4, 5], [6]))
    [sample] = merge_turns(found.kept, requires_spans=True)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6] and sample.loss_mask.sum() == 1
    alone = turns(hidden)
    assert alone.are_all_cut and "has taken out all that was sampled in model call 0" in alone.why_cut


@pytest.mark.parametrize(
    ("hidden", "shown", "earned"),
    [(0.0, None, 0.0), (None, 0.0, 0.0), (0.5, None, 0.5), (0.5, 1.0, 1.5), (0.0, 1.0, 1.0)],
)
def test_what_a_first_turn_earned_of_which_nothing_is_left_counts_for_the_next(
    hidden: float | None, shown: float | None, earned: float
) -> None:
    """A reward of 0 is one."""
    first = step([1, 2], [3, 4], reward=hidden)
    first["tokens"] |= {"completion_ids": [], "completion_logprobs": []}
    [sample] = merge_turns(turns(first, step([1, 2, 3, 4, 5], [6], reward=shown)).kept, requires_spans=True)
    assert [turn.reward for turn in sample.turns] == [earned]


def test_an_answer_without_tokens_is_still_the_engines_fault() -> None:
    found = turns(step([1, 2], []))
    with pytest.raises(MissingTokensError, match="the engine must return"):
        merge_turns(found.kept, requires_spans=True)
    with pytest.raises(MissingTokensError, match="the engine returned no token ids"):
        turns({"tokens": None})


@pytest.mark.parametrize(
    ("prompt", "sampled", "logprobs"),
    [
        ([1, "2"], [3, 4], [-0.5, -0.5]),
        ([1, 2], [3, True], [-0.5, -0.5]),
        ([1, 2], [3, 4.0], [-0.5, -0.5]),
        ([1, 2], [3, 4], [-0.5, None]),
        (None, [3, 4], [-0.5, -0.5]),
    ],
)
async def test_an_answer_with_an_item_of_another_type_has_no_tokens(prompt: Any, sampled: Any, logprobs: Any) -> None:
    session: Any = None
    choice = {"message": {"content": "a"}, "token_ids": sampled, "logprobs": {"token_logprobs": logprobs}}
    answer = {"choices": [choice], "prompt_token_ids": prompt, "_session_id": "", "_sent": None}
    client = LeanClient("http://127.0.0.1", session)
    assert (await client.from_native_response(answer)).message.tokens is None
    choice |= {"token_ids": [3, 4], "logprobs": {"token_logprobs": [-0.5, -1]}}
    found = (await client.from_native_response(answer | {"prompt_token_ids": [1, 2]})).message.tokens
    assert found is not None and (found.prompt_ids, found.completion_ids) == ([1, 2], [3, 4])
    assert (found.prompt_mask, found.completion_mask, found.completion_logprobs) == ([0, 0], [1, 1], [-0.5, -1])
