"""The sampler against probabilities computed in another way."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.inference.embedded.scheduler import penalised, sample, uniforms
from millrace.inference.engine import SamplingParams

VOCAB = 11


def limits(top_p: list[float], top_k: list[int], min_p: list[float]) -> dict[str, np.ndarray]:
    columns = {"top_p_B": np.array(top_p, np.float32), "min_p_B": np.array(min_p, np.float32)}
    return columns | {"top_k_B": np.array(top_k, np.int32)}


def draw(logits: torch.Tensor, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, count=20_000):
    """`count` independent draws from one row of logits."""
    rows = logits.expand(count, -1)
    return sample(
        rows,
        temperatures_B=np.full(count, temperature, np.float32),
        **limits([top_p] * count, [top_k] * count, [min_p] * count),
        uniforms_B=uniforms(np.arange(count).astype(np.uint64) * np.uint64(7919), np.zeros(count, np.int64)),
    )


def expected_probs(logits: torch.Tensor, temperature: float, top_p: float, top_k: int, min_p: float) -> np.ndarray:
    """By the definition: temperature, min_p, the top_k most likely, the smallest set that reaches top_p."""
    probs = torch.softmax(logits.double() / temperature, -1).numpy()
    order = np.argsort(-probs, kind="stable")
    keep = [token for token in order if probs[token] >= min_p * probs.max()][: top_k or VOCAB]
    share = probs[keep] / probs[keep].sum()
    keep = keep[: int(np.searchsorted(np.cumsum(share), top_p)) + 1]
    out = np.zeros_like(probs)
    out[keep] = probs[keep] / probs[keep].sum()
    return out


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [
        (1.0, 1.0, 0, 0.0),
        (0.5, 1.0, 0, 0.0),
        (2.0, 1.0, 3, 0.0),
        (1.0, 0.7, 0, 0.0),
        (0.8, 0.9, 4, 0.0),
        (1.5, 1.0, 0, 0.1),
        (2.0, 0.9, 6, 0.05),
    ],
)
def test_frequencies_and_logprobs_are_those_of_the_distribution(temperature, top_p, top_k, min_p):
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    probs = expected_probs(logits, temperature, top_p, top_k, min_p)
    tokens, logprobs = draw(logits, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    frequencies = np.bincount(tokens.numpy(), minlength=VOCAB) / len(tokens)
    bound = 5 * np.sqrt(probs * (1 - probs) / len(tokens)) + 1e-9  # five standard deviations; 0 where nothing may come
    assert (np.abs(frequencies - probs) <= bound).all()
    np.testing.assert_allclose(logprobs.numpy(), np.log(probs[tokens.numpy()]), atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.floats(-30, 30, width=32) | st.just(float("-inf")), min_size=VOCAB, max_size=VOCAB).filter(
        lambda row: max(row) > float("-inf")
    ),
    uniform=st.sampled_from([0.0, 0.5, 1 - 2.0**-48]) | st.floats(0, 1, exclude_max=True),
    temperature=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    top_p=st.sampled_from([1e-6, 0.5, 1.0]),
    top_k=st.integers(0, VOCAB + 3),
    min_p=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_no_impossible_token_is_ever_drawn(logits, uniform, temperature, top_p, top_k, min_p):
    tokens, logprobs = sample(
        torch.tensor([logits]),
        temperatures_B=np.array([temperature], np.float32),
        **limits([top_p], [top_k], [min_p]),
        uniforms_B=np.array([uniform]),
    )
    assert logits[int(tokens)] > float("-inf")
    assert np.isfinite(float(logprobs)) and float(logprobs) <= 1e-6
    if temperature == 0:
        assert logits[int(tokens)] == max(logits)


def test_rows_do_not_influence_each_other():
    logits = torch.randn(4, VOCAB)
    settings_ = {"temperature": [1.0, 0.0, 0.5, 1.0], "top_p": [1.0, 0.5, 0.3, 0.9], "top_k": [0, 2, 0, 3]}
    settings_["min_p"] = [0.0, 0.5, 0.1, 0.0]
    numbers = np.array([0.1, 0.9, 0.5, 0.7])

    def run(rows: slice):
        return sample(
            logits[rows],
            temperatures_B=np.array(settings_["temperature"], np.float32)[rows],
            **limits(settings_["top_p"][rows], settings_["top_k"][rows], settings_["min_p"][rows]),
            uniforms_B=numbers[rows],
        )

    together = run(slice(0, 4))
    for row in range(4):
        alone = run(slice(row, row + 1))
        assert int(alone[0]) == int(together[0][row])
        torch.testing.assert_close(alone[1][0], together[1][row])


def test_uniforms_are_uniform_and_differ_by_seed_and_counter():
    seeds, counters = np.meshgrid(np.arange(300).astype(np.uint64), np.arange(100), indexing="ij")
    numbers = uniforms(seeds.ravel(), counters.ravel())
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(np.unique(numbers)) == numbers.size
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    expected = numbers.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 60  # chi-square, 19 degrees of freedom: p < 1e-5
    rows = numbers.reshape(seeds.shape)
    assert abs(np.corrcoef(rows[:, 0], rows[:, 1])[0, 1]) < 0.25


PROMPT, COMPLETION = np.array([1, 2], np.int64), np.array([3, 3, 4], np.int64)


def behind_penalties(logits: torch.Tensor, **keys: float) -> torch.Tensor:
    params = SamplingParams(max_tokens=8, **keys)  # type: ignore[arg-type]
    assert params.has_penalties
    return penalised(logits, params, prompt=PROMPT, completion=COMPLETION, stop_ids=np.array([7, -1], np.int64))


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    tokens = torch.from_numpy(np.concatenate([PROMPT, COMPLETION]))[None]
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(tokens, logits[None].clone())[0]
    assert torch.equal(behind_penalties(logits, repetition_penalty=1.7), wanted)


def test_presence_and_frequency_by_hand() -> None:
    """Token 3 is in the completion twice, token 4 once; those of the prompt count for neither."""
    logits = torch.zeros(VOCAB)
    found = behind_penalties(logits, presence_penalty=0.5, frequency_penalty=0.25)
    assert found[3] == -1.0 and found[4] == -0.75 and not found[[0, 1, 2, 5, 6, 7, 8, 9, 10]].any()
    assert not logits.any(), "the model's own logits stay as they are"


def test_no_stop_token_before_the_least_length() -> None:
    assert torch.isneginf(behind_penalties(torch.zeros(VOCAB), min_tokens=4)).nonzero().tolist() == [[7]]
    assert not torch.isneginf(behind_penalties(torch.zeros(VOCAB), min_tokens=3)).any()
