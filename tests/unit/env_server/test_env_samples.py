"""Turns → samples: merged exactly or split, and refused where something is missing."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.env_server.adapters.samples import (
    MAX_ROLLOUTS,
    Call,
    MissingSpansError,
    MissingTokensError,
    SpanLog,
    Spans,
    Turn,
    engine_spans,
    merge_turns,
    parse_spans,
)
from millrace.env_server.adapters.samples_v0 import turns_of
from millrace.env_server.adapters.samples_v1 import branch_samples
from millrace.env_server.own_sampling import AskedSampling
from millrace.internal.v1.play_pb2 import EnvSpec, Sampling
from millrace.rollouts.types import PolicySpan, RoleSpan, Sample
from millrace_testing.thinking_template import END, KEEPS, STRIPS, prompt_encoder


def span(start: int, end: int, version: int = 1) -> PolicySpan:
    return PolicySpan(lineage=0, version=version, start=start, end=end)


def turn(prompt: list[int], completion: list[int], version: int = 1) -> Turn:
    return Turn(
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=[-0.5] * len(completion),
        spans=(span(0, len(completion), version),) if completion else (),
    )


def test_extending_turns_become_one_sample() -> None:
    [sample] = merge_turns([turn([1, 2], [3, 4], 5), turn([1, 2, 3, 4, 9], [7], 6)], requires_spans=True)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 9, 7]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert sample.inference_logprobs.tolist() == [0, 0, -0.5, -0.5, 0, -0.5]
    assert sample.policy_spans == (span(2, 4, 5), span(5, 6, 6))


@pytest.mark.parametrize("prompt", [[1, 2, 3, 9], [1, 2, 3], [5], [1, 2, 8, 4, 9]])
def test_a_turn_that_does_not_extend_begins_a_new_sample(prompt: list[int]) -> None:
    first, second = merge_turns([turn([1, 2], [3, 4]), turn(prompt, [7])], requires_spans=True)
    assert first.token_ids.tolist() == [1, 2, 3, 4]
    assert second.token_ids.tolist() == [*prompt, 7]
    assert second.policy_spans == (span(len(prompt), len(prompt) + 1),)


def test_a_template_that_strips_thoughts_splits_where_it_rewrites() -> None:
    replies = ["<think>a</think>b", "<think>c</think>d", "<think>e</think>f"]

    def samples(template: str) -> tuple[Sample, ...]:
        encode, messages, turns = prompt_encoder(template), [{"role": "user", "content": "q"}], []
        for reply in replies:
            turns.append(turn(encode(messages), list(f"{reply}{END}".encode())))
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "more"}]
        return merge_turns(turns, requires_spans=True)

    [whole] = samples(KEEPS)
    parts = samples(STRIPS)
    texts = [bytes(part.token_ids.tolist()).decode() for part in parts]
    assert texts[0] == "<user>q</s><assistant><think>a</think>b</s>"
    assert texts[1] == "<user>q</s><assistant>b</s><user>more</s><assistant><think>c</think>d</s>"
    assert texts[2].startswith("<user>q</s><assistant>b</s><user>more</s><assistant>d</s>")
    trained = [bytes(part.token_ids[part.loss_mask == 1].tolist()).decode() for part in parts]
    assert trained == [f"{reply}{END}" for reply in replies], "every sampled token is trained once"
    assert bytes(whole.token_ids[whole.loss_mask == 1].tolist()).decode() == "".join(trained)


ids = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=5))
def test_every_sampled_token_is_in_exactly_one_sample_in_its_context(turns: list[tuple[list[int], list[int]]]) -> None:
    samples = merge_turns([turn(prompt, completion) for prompt, completion in turns], requires_spans=True)
    assert sum(int(sample.loss_mask.sum()) for sample in samples) == sum(len(completion) for _, completion in turns)
    whole = [sample.token_ids.tolist() for sample in samples]
    for prompt, completion in turns:
        context = prompt + completion
        assert any(tokens[: len(context)] == context for tokens in whole)
    for sample in samples:
        covered = [index for part in sample.policy_spans for index in range(part.start, part.end)]
        assert covered == [index for index, bit in enumerate(sample.loss_mask) if bit]


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (turn([], [1]), "0 prompt"),
        (turn([1], []), "0 sampled"),
        (replace(turn([1], [2, 3]), logprobs=[-0.5]), "2 sampled tokens but 1 log-probs"),
        (replace(turn([1], [2]), logprobs=[math.nan]), "not a finite number"),
        (replace(turn([1], [2]), logprobs=[-math.inf]), "not a finite number"),
        (replace(turn([1], [2]), logprobs=[-9999.0]), "not a finite number"),
        (replace(turn([1], [2]), logprobs=[0.5]), "log-prob of 0.5"),
        (replace(turn([1], [2]), spans=()), "cover tokens 0 to 0 of 1"),
        (replace(turn([1], [2, 3]), spans=(span(0, 1),)), "cover tokens 0 to 1 of 2"),
        (replace(turn([1], [2, 3]), spans=(span(0, 1), span(0, 2))), "cover tokens 0 to 1 of 2"),
        (replace(turn([1], [2, 3]), spans=(span(1, 2), span(0, 1))), "cover tokens 0 to 0 of 2"),
    ],
)
def test_what_is_missing_is_named(broken: Turn, text: str) -> None:
    with pytest.raises(MissingTokensError, match=text):
        merge_turns([broken], requires_spans=True)


def test_no_turns() -> None:
    with pytest.raises(MissingTokensError, match="no model call"):
        merge_turns([], requires_spans=False)


def test_evaluations_do_without_spans() -> None:
    [sample] = merge_turns([replace(turn([1], [2]), spans=())], requires_spans=False)
    assert sample.policy_spans == ()


@pytest.mark.parametrize(
    "raw", [None, "x", [1], [{"lineage": 0}], [{"lineage": "a", "version": 1, "start": 0, "end": 1}]]
)
def test_unreadable_spans_are_no_spans(raw: Any) -> None:
    assert parse_spans(raw) == ()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([None, None], []),
        ([0.0, 0.0], [0.0, 0.0]),
        ([0.0, None], [0.0, 0.0]),
        ([None, 2.0], [0.0, 2.0]),
    ],
)
def test_a_turn_that_earned_0_has_a_reward(given: list[float | None], kept: list[float]) -> None:
    first, second = given
    turns = [replace(turn([1], [2]), reward=first), replace(turn([1, 2, 3], [4]), reward=second)]
    [sample] = merge_turns(turns, requires_spans=True)
    assert [each.reward for each in sample.turns] == kept


def test_readable_spans() -> None:
    assert parse_spans([{"lineage": 0, "version": 7, "start": 0, "end": 2}]) == (span(0, 2, 7),)


def test_spans_of_vllm_are_read_and_ours_go_first() -> None:
    native = [{"version": "2-7", "start": 0, "end": 3}, {"version": "2-8", "start": 3, "end": 4}]
    wanted = (PolicySpan(lineage=2, version=7, start=0, end=3), PolicySpan(lineage=2, version=8, start=3, end=4))
    assert engine_spans({"weight_versions": native}) == wanted
    ours = [{"lineage": 0, "version": 1, "start": 0, "end": 4}]
    assert engine_spans({"policy_spans": ours, "weight_versions": native}) == (span(0, 4),)
    assert engine_spans({}) == ()


@pytest.mark.parametrize("version", ["default", "7", "a-b", "-7", None, 7])
def test_a_weight_version_that_is_not_ours_is_no_span(version: Any) -> None:
    assert engine_spans({"weight_versions": [{"version": version, "start": 0, "end": 1}]}) == ()


def test_missing_spans_have_a_type_of_their_own() -> None:
    with pytest.raises(MissingSpansError, match="Millrace's inference service") as caught:
        merge_turns([replace(turn([1], [2]), spans=())], requires_spans=True)
    assert caught.value.error_type == "MissingPolicySpans"


def test_span_log_finds_completions_in_order_and_forgets() -> None:
    log = SpanLog()
    log.note("a", [1, 2], (span(0, 2, 1),))
    log.note("a", [1, 2], (span(0, 2, 2),))
    log.note("b", [1, 2], (span(0, 2, 3),))
    spans = log.take("a")
    assert [spans.find([1, 2]).spans[0].version for _ in range(2)] == [1, 2]
    assert spans.find([1, 2]).spans == ()
    assert log.take("a").find([1, 2]).spans == ()
    assert log.take("b").find([1]).spans == (span(0, 1, 3),)  # the environment cut the completion short


def test_span_log_tells_parallel_calls_apart_of_which_one_begins_with_the_other() -> None:
    log = SpanLog()
    log.note("a", [1, 2, 3], (span(0, 3, 1),))
    log.note("a", [1, 2], (span(0, 2, 2),))
    spans = log.take("a")
    assert spans.find([1, 2]).spans == (span(0, 2, 2),)
    assert spans.find([1, 2, 3]).spans == (span(0, 3, 1),)


def test_span_log_is_bounded() -> None:
    log = SpanLog()
    for index in range(MAX_ROLLOUTS + 1):
        log.note(str(index), [1], (span(0, 1),))
    assert log.take("0").find([1]).spans == ()
    assert log.take("1").find([1]).spans == (span(0, 1),)


def node(token_ids: list[int], num_sampled: int) -> Any:
    mask = [False] * (len(token_ids) - num_sampled) + [True] * num_sampled
    message = SimpleNamespace(role="assistant" if num_sampled else "tool")
    return SimpleNamespace(
        token_ids=token_ids, mask=mask, sampled=num_sampled > 0, logprobs=[-1.0] * num_sampled, message=message
    )


def role(name: str, start: int, end: int) -> RoleSpan:
    return RoleSpan(role=name, start=start, end=end)


def test_what_the_environment_adds_behind_a_reply_is_of_its_role() -> None:
    first, second = turn([1, 2], [3, 4]), replace(turn([1, 2, 3, 4, 8, 9], [7]), asked_by="tool")
    third = replace(turn([1, 2, 3, 4, 8, 9, 7, 5], [6]), asked_by="")
    [sample] = merge_turns([replace(first, asked_by="user"), second, third], requires_spans=True)
    assert sample.roles == (role("tool", 4, 6),), "the first prompt is nobody's reply, and mixed roles are unknown"
    other = replace(turn([5, 5], [6]), asked_by="tool")
    assert [each.roles for each in merge_turns([first, other], requires_spans=True)] == [(), ()]


@pytest.mark.parametrize(
    ("roles", "wanted"),
    [
        (["system", "user", "assistant", "tool", "tool"], "tool"),
        (["user", "assistant", "tool", "user"], ""),
        (["user"], ""),
        (["user", "assistant", "user"], "user"),
    ],
)
def test_a_v0_prompt_says_who_spoke_behind_the_last_reply(roles: list[str], wanted: str) -> None:
    tokens = {"prompt_ids": [1], "completion_ids": [2], "completion_logprobs": [-1.0]}
    for kind in (dict, SimpleNamespace):
        step = {"tokens": tokens, "prompt": [kind(role=each) for each in roles]}
        kept = turns_of([step], Spans([]), AskedSampling(EnvSpec(), Sampling(temperature=1.0)))
        assert [each.asked_by for each in kept.kept] == [wanted]


def test_v1_messages_behind_a_reply_keep_their_role_and_their_content_alone() -> None:
    user, shared, said = node([1, 2], 0), node([3, 4, 5], 2), node([6, 7, 8], 0)
    said.is_content = [False, True, False]
    branches = [
        SimpleNamespace(nodes=[user, shared, said, node([9], 1)]),
        SimpleNamespace(nodes=[user, shared, said, node([8], 0), node([9], 1)]),
    ]
    first, second = branch_samples(branches, Spans([]), requires_spans=False)
    assert first.roles == (role("tool", 6, 7),)
    assert second.roles == (role("tool", 8, 9),), "what two branches share is of the first"


def test_v1_branches_train_shared_tokens_once() -> None:
    user, shared = node([1, 2], 0), node([3, 4, 5], 2)
    branches = [
        SimpleNamespace(nodes=[user, shared, node([6], 0), node([7], 1)]),
        SimpleNamespace(nodes=[user, shared, node([8], 0), node([9], 1)]),
    ]
    notes = [
        Call(completion_ids=(4, 5), spans=(span(0, 2, 1),)),
        Call(completion_ids=(7,), spans=(span(0, 1, 2),)),
        Call(completion_ids=(9,), spans=(span(0, 1, 3),)),
    ]
    first, second = branch_samples(branches, Spans(notes), requires_spans=True)
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert first.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert first.policy_spans == (span(3, 5, 1), span(6, 7, 2))
    assert second.token_ids.tolist() == [1, 2, 3, 4, 5, 8, 9]
    assert second.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert second.inference_logprobs.tolist() == [0, 0, 0, 0, 0, 0, -1]
    assert second.policy_spans == (span(6, 7, 3),)


def test_v1_branches_that_are_not_trainable_leave_what_they_share_to_the_next() -> None:
    """verifiers 0.4 marks attempts at a compaction that the harness gave up; they may have sampled the same tokens."""
    user, shared = node([1, 2], 0), node([3, 4, 5], 2)
    branches = [
        SimpleNamespace(nodes=[user, shared, node([6], 0), node([7], 1)], trainable=False),
        SimpleNamespace(nodes=[user, shared, node([8], 0), node([7], 1)], trainable=True),
    ]
    notes = [
        Call(completion_ids=(4, 5), spans=(span(0, 2, 1),)),
        Call(completion_ids=(7,), spans=(span(0, 1, 2),)),
        Call(completion_ids=(7,), spans=(span(0, 1, 3),)),
    ]
    [only] = branch_samples(branches, Spans(notes), requires_spans=True)
    assert only.token_ids.tolist() == [1, 2, 3, 4, 5, 8, 7]
    assert only.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert only.policy_spans == (span(3, 5, 1), span(6, 7, 3))
    branches[1].trainable = False
    with pytest.raises(MissingTokensError, match="no trainable branch"):
        branch_samples(branches, Spans([]), requires_spans=False)


def test_v1_trace_without_tokens() -> None:
    empty = SimpleNamespace(token_ids=[], mask=[], sampled=True, logprobs=[])
    with pytest.raises(MissingTokensError, match="no token ids"):
        branch_samples([SimpleNamespace(nodes=[empty])], Spans([]), requires_spans=False)
    with pytest.raises(MissingTokensError, match="no model call"):
        branch_samples([], Spans([]), requires_spans=False)
