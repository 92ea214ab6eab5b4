"""Recorded experts on their way through rows of every kind: padded, packed, cut, recomputed, and of a reference."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.config.sections.trainer import ActivationCheckpointConfig, LoraConfig
from millrace.models.routing import FREE, Routers, replay_routing, routers_of
from millrace.rollouts.types import TrainSample
from millrace.trainer.learning.batch import MicroBatch, Minibatch, build_micro_batch
from millrace.trainer.learning.forward import token_logprobs
from millrace.trainer.learning.learner import Learner, UnadaptedModel
from millrace.trainer.learning.metrics import NOT_FITTING, NOT_RECORDED, ReplayWatch, StepMetrics
from millrace.trainer.model.lora import add_adapters
from millrace.trainer.model.memory import checkpoint_activations
from millrace_testing.trainer.families import make_named

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3, experts"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_named(request.param, tmp_path_factory.mktemp("mixture"))


def _model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def _sample(length: int, experts: np.ndarray | None, **changes: Any) -> TrainSample:
    mask = np.ones(length, np.uint8)
    mask[0] = 0
    values: dict[str, Any] = {
        "token_ids": (7 * np.arange(length, dtype=np.int32) + length) % 60,
        "loss_mask": mask,
        "inference_logprobs": np.zeros(length, np.float32),
        "advantages": np.ones(length, np.float32),
        "ordinal": 0,
        "member": 0,
        "attempt": 0,
        "env": "",
        "reward": 0.0,
        "temperature": 1.0,
        "min_version": 0,
        "max_version": 0,
        "lineage": 0,
        "routed_experts": experts,
    }
    return TrainSample(**{**values, **changes})


def _experts(shape: Any, tokens: int, seed: int) -> np.ndarray:
    """Return different experts for each token and layer."""
    random = np.random.default_rng(seed)
    order = random.random((tokens, len(shape.layers), shape.num_experts)).argsort(axis=-1)
    return order[..., : shape.top_k].astype(np.uint8)


def _logprobs(model: Any, micro_batch: MicroBatch) -> torch.Tensor:
    with torch.no_grad():
        return token_logprobs(model, micro_batch)[0]


def test_packed_padded_and_cut_rows_give_each_token_its_own_experts(directory: Path) -> None:
    model = _model(directory)
    routing = replay_routing(model, key="k")
    samples = [
        _sample(9, _experts(routing, 8, 1)),
        _sample(5, None),
        _sample(7, _experts(routing, 3, 2)),
        _sample(14, _experts(routing, 13, 3)),
    ]
    build: dict[str, Any] = {"seq_len": 12, "device": CPU, "routing": routing}
    alone = [_logprobs(model, build_micro_batch([each], **build))[0] for each in samples]
    free = [_logprobs(model, build_micro_batch([each], seq_len=12, device=CPU))[0] for each in samples]
    assert [bool(torch.allclose(one, other, atol=1e-4)) for one, other in zip(alone, free, strict=True)] == [
        False,
        True,
        False,
        False,
    ]
    for rows in (None, [[0, 1, 2], [3]], [[3, 1], [2, 0]]):
        micro_batch = build_micro_batch(samples, rows=rows, **build)
        found = _logprobs(model, micro_batch)
        for row, each in enumerate(alone):
            torch.testing.assert_close(found[row, : len(each)], each, atol=1e-4, rtol=1e-4)
        assert (micro_batch.num_routed_tokens, micro_batch.num_tokens) == (8 + 3 + 12, 9 + 5 + 7 + 12)
    experts = build_micro_batch(samples, rows=[[0, 1, 2], [3]], **build).rows.experts_RLXK
    assert experts is not None and experts.shape[:2] == (2, 21)
    assert (experts[0, :, 0, 0] == FREE).tolist() == [False] * 8 + [True] * 6 + [False] * 3 + [True] * 4


def test_given_experts_are_those_that_a_plain_forward_takes(directory: Path) -> None:
    model = _model(directory)
    routing = replay_routing(model, key="k")
    routers = routers_of(model)
    assert routers is not None
    experts = _experts(routing, 9, 4)
    with routers.recording() as recorded:
        _logprobs(model, build_micro_batch([_sample(9, experts)], seq_len=16, device=CPU, routing=routing))
    assert np.array_equal(recorded(), experts)


def test_wider_rows_and_a_rank_without_samples_are_free_where_nothing_is_recorded(directory: Path) -> None:
    model = _model(directory)
    routing = replay_routing(model, key="k")
    micro_batch = build_micro_batch([_sample(5, _experts(routing, 4, 1))], seq_len=8, device=CPU, routing=routing)
    wider = micro_batch.rows.widened(9).experts_RLXK
    assert wider is not None and (wider[0, :, 0, 0] == FREE).tolist() == [False] * 4 + [True] * 5
    empty = build_micro_batch([], seq_len=8, device=CPU, routing=routing)
    assert empty.num_routed_tokens == 0 and torch.isfinite(_logprobs(model, empty)).all()


def _gradients(model: Any, micro_batch: MicroBatch) -> list[torch.Tensor]:
    model.zero_grad()
    token_logprobs(model, micro_batch)[0].square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_a_backward_that_computes_blocks_again_sends_tokens_to_the_same_experts(directory: Path) -> None:
    plain, recomputing = _model(directory), _model(directory)
    checkpoint_activations(recomputing, ActivationCheckpointConfig())
    recomputing.train()
    found = []
    for model in (plain, recomputing):
        routing = replay_routing(model, key="k")
        sample = _sample(12, _experts(routing, 11, 5))
        micro_batch = build_micro_batch([sample], seq_len=16, device=CPU, routing=routing)
        found.append(_gradients(model, micro_batch))
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_adapters_learn_with_the_experts_that_are_given(directory: Path) -> None:
    model, base = _model(directory), _model(directory)
    add_adapters(model, LoraConfig(rank=4, target_modules=["q_proj", "o_proj"]), seed=0)
    routing = replay_routing(model, key="k")
    assert replay_routing(base, key="k") == routing
    micro_batch = build_micro_batch([_sample(9, _experts(routing, 8, 1))], seq_len=16, device=CPU, routing=routing)
    assert torch.equal(_logprobs(model, micro_batch), _logprobs(base, micro_batch)), "a new adapter changes nothing"
    token_logprobs(model, micro_batch)[0].square().mean().backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(parameter.grad is not None for parameter in trained.values())
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(0.1)
    routers = routers_of(model)
    assert routers is not None
    with routers.recording() as recorded:
        changed = _logprobs(model, micro_batch)
    assert np.array_equal(recorded()[:8], _experts(routing, 8, 1))
    assert not torch.allclose(changed, _logprobs(base, micro_batch), atol=1e-4)
    # The start model is the base under the adapters, and its routers choose.
    free = build_micro_batch([_sample(9, None)], seq_len=16, device=CPU)
    torch.testing.assert_close(UnadaptedModel(model).logprobs(micro_batch), _logprobs(base, free))


def test_routers_of_a_reference_choose(directory: Path) -> None:
    model = _model(directory)
    routing = replay_routing(model, key="k")
    sample = _sample(9, _experts(routing, 8, 1))
    given = build_micro_batch([sample], seq_len=16, device=CPU, routing=routing)
    free = build_micro_batch([sample], seq_len=16, device=CPU)
    reference = UnadaptedModel(model)
    assert torch.equal(reference.logprobs(given), _logprobs(model, free))
    # And what a later forward of the policy takes is not the reference's.
    assert not torch.allclose(_logprobs(model, given), _logprobs(model, free), atol=1e-4)


def test_experts_are_taken_back_before_a_forward_of_others(directory: Path) -> None:
    """A version is published with log-probs on a prompt of its own, by a forward that knows nothing of experts."""
    model = _model(directory)
    routing = replay_routing(model, key="k")
    given = build_micro_batch([_sample(9, _experts(routing, 8, 1))], seq_len=16, device=CPU, routing=routing)
    prompt = torch.arange(4).view(1, 4)
    with torch.no_grad():
        before = model(input_ids=prompt, use_cache=False).logits
    _logprobs(model, given)
    with torch.no_grad():
        assert torch.equal(model(input_ids=prompt, use_cache=False).logits, before)
    learner: Any = SimpleNamespace(model=model, config=SimpleNamespace(model=SimpleNamespace(dropout=False)))
    with Learner.learning(learner):
        token_logprobs(model, given)[0].sum().backward()
    with torch.no_grad():
        assert torch.equal(model(input_ids=prompt, use_cache=False).logits, before)


def test_the_share_of_replayed_tokens_is_measured_and_none_is_news_once(directory: Path) -> None:
    model = _model(directory)
    routing = Routers.of(model)
    assert routing is not None
    metrics = StepMetrics([])
    samples = [_sample(9, _experts(routing.shape, 8, 1)), _sample(7, None)]
    micro_batch = build_micro_batch(samples, seq_len=16, device=CPU, routing=routing.shape)
    metrics.add_replayed(Minibatch(micro_batches=[micro_batch], samples=[[0, 1]]))
    assert StepMetrics.merged([metrics]).values()["replayed_tokens/mean"] == 8 / 16
    assert "replayed_tokens/mean" not in StepMetrics([]).values()
    assert StepMetrics.merged([metrics]).values()["misfit_experts/mean"] == 0
    watch = ReplayWatch()
    shares: list[float | None] = [None, 0.5, 0.0, 0.0, None, 0.0, 0.2, 0.0]
    told = [watch.news({} if share is None else {"replayed_tokens/mean": share}) for share in shares]
    assert told == [[], [], [NOT_RECORDED], [], [], [], [], [NOT_RECORDED]]
    misfits = [0.5, 1.0, 0.0, 0.1]
    told = [watch.news({"replayed_tokens/mean": 0.5, "misfit_experts/mean": misfit}) for misfit in misfits]
    assert told == [[NOT_FITTING], [], [], [NOT_FITTING]]


def test_experts_of_another_model_leave_their_sample_to_the_routers(directory: Path) -> None:
    """Their batch is in the log, so that a step which fails on them would fail after every resume."""
    model = _model(directory)
    routing = replay_routing(model, key="k")
    right = _experts(routing, 8, 1)
    too_large, twice = right.copy(), right.copy()
    too_large[7, -1, 0] = routing.num_experts
    twice[3, 0] = twice[3, 0, 0]
    wrong = [too_large, twice, right[:, :, :1], np.concatenate([right] * 3, axis=1)[:, : routing.num_hidden_layers + 1]]
    build: dict[str, Any] = {"seq_len": 12, "device": CPU, "routing": routing}
    samples = [_sample(9, right), *(_sample(9, experts) for experts in wrong)]
    micro_batch = build_micro_batch(samples, rows=[[0, 1], [2, 3], [4]], **build)
    assert (micro_batch.num_routed_tokens, micro_batch.num_misfit_tokens) == (8, 4 * 8)
    found = _logprobs(model, micro_batch)
    torch.testing.assert_close(found[0], _logprobs(model, build_micro_batch(samples[:1], **build))[0])
    free = _logprobs(model, build_micro_batch(samples[:1], seq_len=12, device=CPU))[0]
    torch.testing.assert_close(found[1:], free.expand(4, -1), atol=1e-4, rtol=1e-4)
    metrics = StepMetrics([])
    metrics.add_replayed(Minibatch(micro_batches=[micro_batch], samples=[[0, 1, 2, 3, 4]]))
    assert StepMetrics.merged([metrics]).values()["misfit_experts/mean"] == 32 / 40
