"""Environments that set a sampling of their own: what the engine was sent is what the trainer computes, or is refused.

Each is played with the adapter of its generation against the embedded engine over HTTP, without a stack.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import verifiers as vf
from datasets import Dataset

from millrace.env_server.adapters.adapter import EnvAdapter
from millrace.env_server.adapters.outcome import make_rollout
from millrace.env_server.adapters.v0 import V0Adapter
from millrace.env_server.adapters.v1 import V1Adapter
from millrace.internal.v1 import rollout_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, Sampling
from millrace.rollouts.types import OWN_SAMPLING, Rollout, RolloutStatus, TrainSample, Truncation
from millrace.rollouts.wire import decode_rollout, encode_rollout
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import build_micro_batch
from millrace.trainer.learning.forward import token_logprobs
from millrace.trainer.learning.metrics import Score, ScoreResult

CPU = torch.device("cpu")
FIXTURES = Path(__file__).parents[2] / "fixtures" / "environments"
NOISE = 1e-6
ROWS = [{"question": text, "answer": text} for text in ("turn me around", "and me")]


class Turns(vf.MultiTurnEnv):
    """Says another sampling for each turn."""

    def __init__(self, says: list[dict[str, Any]], **kwargs: Any) -> None:
        super().__init__(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[half]), max_turns=len(says), **kwargs)
        self.says = says

    async def get_model_response(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        says = self.says[len(state["trajectory"])]
        state["sampling_args"] = (state["sampling_args"] or {}) | says
        if "model" in says:
            state["model"] = state["sampling_args"].pop("model")
        return await super().get_model_response(state, *args, **kwargs)

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [vf.UserMessage(content="once more")]


def half(completion: Any) -> float:
    return 0.5


Play = Callable[..., Any]


@pytest.fixture
async def play(served: Any, full_model_dir: Path) -> AsyncIterator[Play]:
    """Yield plays a task of an adapter's with a run's sampling, and gives the rollout as the log would have it."""
    opened: list[EnvAdapter] = []

    async def run(
        adapter: EnvAdapter, *, purpose: rollout_pb2.Purpose = rollout_pb2.PURPOSE_TRAIN, **sampling: Any
    ) -> Rollout:
        if adapter not in opened:
            await adapter.start()
            opened.append(adapter)
        request = PlayGroupRequest(
            run_uid="r",
            purpose=purpose,
            ordinal=0,
            members=[0],
            group_size=1,
            env=EnvSpec(name="talk", id="talk"),
            base_url=f"{served.base_url}/v1",
            use_train_tasks=True,
            model="policy",
            sampling=Sampling(**{"temperature": 1.0, "max_tokens": 24, **sampling}),
            rollout_timeout_seconds=60,
        )
        [outcome] = await adapter.play(request, tokenizer_dir=str(full_model_dir))
        made = make_rollout(request, member=0, task_id="t", outcome=outcome, seconds=1.0)
        return decode_rollout(encode_rollout(made))

    yield run
    for adapter in opened:
        await adapter.close()


def v0(*says: dict[str, Any], renderer: str = "off", **kwargs: Any) -> V0Adapter:
    module = ModuleType("talk")
    module.load_environment = lambda: Turns(list(says), **kwargs)  # type: ignore[attr-defined]
    return V0Adapter.load(EnvSpec(name="talk", id="talk"), module, {} if kwargs else {"renderer": renderer})


def v1(monkeypatch: pytest.MonkeyPatch, **sampling: Any) -> V1Adapter:
    monkeypatch.syspath_prepend(str(FIXTURES / "rev_text_v1"))
    spec = EnvSpec(name="talk", id="rev-text-v1")
    return V1Adapter.load(spec, {"num_examples": 2, "renderer": "default", "env": {"agent": {"sampling": sampling}}})


def scored(model: torch.nn.Module, rollout: Rollout, *, as_the_run_asks: bool = False) -> ScoreResult:
    """Return what the trainer says of a rollout's tokens."""
    assert rollout.status is RolloutStatus.OK, rollout.error
    samples = [
        TrainSample(
            token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
            inference_logprobs=sample.inference_logprobs,
            advantages=np.zeros(sample.num_tokens, np.float32),
            ordinal=0,
            member=0,
            attempt=0,
            env="talk",
            reward=0.0,
            temperature=rollout.temperature,
            truncation=rollout.truncation,
            own_sampling=() if as_the_run_asks else sample.own_sampling,
            min_version=0,
            max_version=0,
            lineage=0,
        )
        for sample in rollout.samples
    ]
    micro_batch = build_micro_batch(samples, seq_len=512, device=CPU)
    with torch.no_grad():
        logprobs_BT, _ = token_logprobs(model, micro_batch)
    score = Score()
    score.add(micro_batch, logprobs_BT, version=0)
    return score.reduce(Gang())


def ways(rollout: Rollout) -> list[tuple[float, Truncation]]:
    """Those of all samples, each once."""
    found = [(own.temperature, own.truncation) for sample in rollout.samples for own in sample.own_sampling]
    return list(dict.fromkeys(found))


CUT = {"temperature": 1.3, "top_p": 0.9, "extra_body": {"top_k": 8, "min_p": 0.01}}
CUT_WAY = (1.3, Truncation(top_p=0.9, top_k=8, min_p=0.01))


@pytest.mark.parametrize("route", ["chat", "completion", "renderer"])
async def test_each_turn_is_trained_as_it_was_sampled(served: Any, play: Play, route: str) -> None:
    says = [{"temperature": 0.5}, {}, CUT]
    match route:
        case "completion":
            adapter = v0(*says, message_type="completion")
        case "renderer":
            adapter = v0(*says, renderer="default")
        case _:
            adapter = v0(*says)
    rollout = await play(adapter, temperature=0.8)
    found = scored(served.model, rollout)
    assert found.mismatch_kl <= NOISE and found.num_outside_tokens == 0
    assert found.num_tokens == rollout.num_loss_tokens and rollout.num_turns == 3
    assert ways(rollout) == [(0.5, Truncation()), CUT_WAY], "the second turn goes on with what the state says"
    assert scored(served.model, rollout, as_the_run_asks=True).mismatch_kl > 0.01
    instead = json.loads(rollout.sampling_json)["environment"]
    assert instead == [{"temperature": 0.5}, {"temperature": 1.3, "top_p": 0.9, "top_k": 8, "min_p": 0.01}]


async def test_a_role_of_v1_is_trained_as_it_was_sampled(
    served: Any, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = await asyncio.to_thread(v1, monkeypatch, temperature=0.5, top_p=0.9)  # loads outside of an event loop
    rollout = await play(adapter, temperature=0.8)
    found = scored(served.model, rollout)
    assert found.mismatch_kl <= NOISE and found.num_tokens == rollout.num_loss_tokens > 0
    assert ways(rollout) == [(0.5, Truncation(top_p=0.9))]
    assert scored(served.model, rollout, as_the_run_asks=True).mismatch_kl > 0.01
    refused = await play(await asyncio.to_thread(v1, monkeypatch, extra_body={"min_tokens": 3}))
    assert refused.error is not None and refused.error.type == OWN_SAMPLING
    assert "environment 'talk' sends `min_tokens` = 3 of its own" in refused.error.message


async def test_what_a_turn_leaves_out_is_no_default_of_the_engines(served: Any, play: Play) -> None:
    """Engines take what is not said from the model's files; here it is said what is recorded."""
    rollout = await play(v0({"temperature": None, "extra_body": None, "top_p": None}), temperature=0.7, top_k=5)
    assert ways(rollout) == [(1.0, Truncation())]
    assert scored(served.model, rollout).mismatch_kl <= NOISE


@pytest.mark.parametrize("renderer", ["off", "default"])
async def test_what_the_trainer_cannot_compute_fails_the_rollout_by_name(play: Play, renderer: str) -> None:
    """Also where the engine refuses it, which would say nothing of the environment."""
    bias = {"extra_body": {"logit_bias": {"5": 2.0}}}
    for says, name in (({"seed": 3}, "seed"), (bias, "logit_bias"), ({"model": "another"}, "model")):
        rollout = await play(v0({}, says, renderer=renderer), temperature=0.7)
        assert rollout.status is RolloutStatus.ENV_ERROR and rollout.error is not None
        assert rollout.error.type == OWN_SAMPLING
        assert f"environment 'talk' sends `{name}` = " in rollout.error.message


async def test_an_evaluation_may_be_sampled_in_any_way(served: Any, play: Play) -> None:
    rollout = await play(v0({"temperature": 0.5, "seed": 3}, {"temperature": 0}), purpose=rollout_pb2.PURPOSE_EVAL)
    assert ways(rollout) == [(0.5, Truncation()), (0, Truncation())]
    assert scored(served.model, rollout).mismatch_kl <= NOISE


async def test_calls_that_nothing_is_trained_of_may_ask_for_anything(play: Play) -> None:
    class Simulated(Turns):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            asked = {"sampling_args": {"temperature": 0, "seed": 1, "max_tokens": 4}}
            said = await vf.MultiTurnEnv.get_model_response(self, state, messages, **asked)
            return [vf.UserMessage(content=f"user: {said.message.content}")]

    module = ModuleType("talk")
    module.load_environment = lambda: Simulated([{}, {}])  # type: ignore[attr-defined]
    rollout = await play(V0Adapter.load(EnvSpec(name="talk", id="talk"), module, {"renderer": "off"}))
    assert rollout.status is RolloutStatus.OK and ways(rollout) == []
