"""Preference pairs: rows, masks, the DPO loss beside autograd in float64, and runs that are continued."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from millrace.config.sections.sft import DPOConfig, SFTConfig, SFTDataConfig
from millrace.errors import InvalidSpecError, InvalidStateError
from millrace.models.vocabulary import load_tokenizer
from millrace.rollouts.types import TrainSample
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import MicroBatch, build_micro_batch
from millrace.trainer.learning.forward import token_logprobs
from millrace.trainer.learning.plan import Packing
from millrace.trainer.sft.data import RowEncoder
from millrace.trainer.sft.fine_tune import run_sft
from millrace.trainer.sft.pairs import Preferences, plan_pairs, preference_losses
from millrace.trainer.sft.rows import load_rows

USER, OTHER = ({"role": "user", "content": content} for content in ("toma", "vo"))


def says(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


@pytest.fixture(scope="module")
def tokenizer(example: Path) -> Any:
    return load_tokenizer(example / "base")


def encoded(tokenizer: Any, row: dict[str, Any], *, seq_len: int = 96) -> list[TrainSample]:
    samples = RowEncoder(tokenizer, seq_len=seq_len).encode_whole(row)
    assert samples is not None
    return samples


def trained(tokenizer: Any, sample: TrainSample) -> str:
    assert sample.ce_weights is not None
    return tokenizer.decode(sample.token_ids[sample.ce_weights == 1])


def test_only_the_responses_of_a_pair_count(tokenizer: Any) -> None:
    chosen, rejected = encoded(tokenizer, {"prompt": "toma", "chosen": "amot", "rejected": "am"})
    assert tokenizer.decode(chosen.token_ids).startswith("<|im_start|>user\ntoma<|im_end|>")
    assert [trained(tokenizer, each) for each in (chosen, rejected)] == ["amot<|im_end|>", "am<|im_end|>"]


def test_every_form_of_a_pair_gives_the_same_samples(tokenizer: Any) -> None:
    forms = [
        {"prompt": "toma", "chosen": "amot", "rejected": "am"},
        {"prompt": [USER], "chosen": [says("amot")], "rejected": [says("am")]},
        {"chosen": [USER, says("amot")], "rejected": [USER, says("am")]},
    ]
    first, *others = (encoded(tokenizer, form) for form in forms)
    assert all(each == first for each in others)


def test_earlier_answers_of_the_common_beginning_do_not_count(tokenizer: Any) -> None:
    begin = [USER, says("amot"), {"role": "user", "content": "b"}]
    row = {"chosen": [*begin, says("cd")], "rejected": [*begin, says("e")]}
    assert [trained(tokenizer, each) for each in encoded(tokenizer, row)] == ["cd<|im_end|>", "e<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "`rejected` is empty"),
        ({"prompt": [USER], "chosen": [], "rejected": [says("b")]}, "`chosen` is empty"),
        ({"prompt": [USER], "chosen": [OTHER], "rejected": [says("b")]}, "`chosen` is empty"),
        ({"prompt": [USER], "chosen": [USER, says("b")], "rejected": [USER, says("c")]}, "`chosen` begins with the"),
        ({"chosen": [USER, says("b")], "rejected": [USER]}, "`rejected` is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ({"chosen": [USER, says("b")], "rejected": [USER, says("b")]}, "are the same"),
        ({"chosen": [USER, says("b")], "rejected": [says("b")]}, "no common message"),
    ],
)
def test_a_pair_that_cannot_be_learned_is_named_with_its_cause(
    tokenizer: Any, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidSpecError, match=message) as raised:
        RowEncoder(tokenizer, seq_len=64).require_completion([(row, "pairs.jsonl:7")])
    assert raised.value.violations[0].source == "pairs.jsonl:7"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "chosen": "b"}', "needs `prompt`, `chosen` and `rejected`"),
        ('{"prompt": "a", "completion": "b"}', "needs `prompt`, `chosen` and `rejected`"),
        ('{"chosen": "b", "rejected": "c"}', "`chosen` is text, `rejected` is text"),
        ('{"prompt": "a", "chosen": "b", "rejected": []}', "`rejected` is a list"),
        ('{"prompt": "a", "chosen": "b", "rejected": 3}', "`rejected` is a number"),
        ('{"prompt": [], "chosen": [{"content": "b"}], "rejected": []}', "`chosen.0.` is no message"),
    ],
)
def test_a_line_that_is_no_pair_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' + line + "\n")
    with pytest.raises(InvalidSpecError, match=message) as raised:
        load_rows(SFTDataConfig(name=str(path)), is_paired=True)
    assert raised.value.violations[0].source == f"{path}:2"


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_the_loss_and_its_gradient_are_those_of_the_paper(label_smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(5, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    losses = preference_losses(rewards, label_smoothing=label_smoothing)
    for (chosen, rejected), loss in zip(rewards.tolist(), losses.tolist(), strict=True):
        right, wrong = 1 / (1 + math.exp(rejected - chosen)), 1 / (1 + math.exp(chosen - rejected))
        plain = -(1 - label_smoothing) * math.log(right) - label_smoothing * math.log(wrong)
        assert loss == pytest.approx(plain, rel=1e-12)
    assert torch.autograd.gradcheck(
        lambda given: preference_losses(given, label_smoothing=label_smoothing), (rewards,), atol=1e-9
    )
    # -(σ(-m) - e) by the chosen reward: the paper's weight, minus what is taken to be labelled the wrong way round.
    (slope,) = torch.autograd.grad(losses.sum(), rewards)
    margin = (rewards[:, 0] - rewards[:, 1]).detach()
    assert torch.allclose(slope[:, 0], -(torch.sigmoid(-margin) - label_smoothing), atol=1e-12)
    assert torch.isfinite(preference_losses(torch.tensor([[-900.0, 900.0]]), label_smoothing=label_smoothing)).all()


def model_at(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory).double()


class Plain:
    """A reference in float64."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        return token_logprobs(self._model, micro_batch)[0]


def plain_loss(policy: Any, reference: Any, pairs: list[list[TrainSample]], config: DPOConfig) -> torch.Tensor:
    """Compute the mean loss of pairs from whole logits, one sample at a time."""

    def logprob(model: Any, sample: TrainSample) -> torch.Tensor:
        token_ids = torch.tensor(sample.token_ids[None].astype("int64"))
        logprobs = torch.log_softmax(model(input_ids=token_ids).logits[0, :-1], dim=-1)
        own = logprobs.gather(1, token_ids[0, 1:, None])[:, 0]
        assert sample.ce_weights is not None
        return own[torch.tensor(sample.ce_weights[1:] == 1)].sum()

    total = torch.zeros((), dtype=torch.float64)
    for chosen, rejected in pairs:
        with torch.no_grad():
            before = logprob(reference, chosen) - logprob(reference, rejected)
        margin = config.beta * (logprob(policy, chosen) - logprob(policy, rejected) - before)
        total = total - (1 - config.label_smoothing) * torch.log(torch.sigmoid(margin))
        total = total - config.label_smoothing * torch.log(torch.sigmoid(-margin))
    return total / len(pairs)


@pytest.mark.parametrize("max_tokens", [1, 10_000])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_gradient_of_a_model_is_that_of_the_plain_formula(
    example: Path, tokenizer: Any, max_tokens: int, is_packed: bool
) -> None:
    rows = [("toma", "amot", "am"), ("b", "b", "some long answer"), ("vo povi", "ivop ov", "x")]
    pairs = [encoded(tokenizer, dict(zip(("prompt", "chosen", "rejected"), row, strict=True))) for row in rows]
    config = DPOConfig(beta=0.3, label_smoothing=0.1)
    policy = model_at(example / "base")
    with torch.no_grad():
        for number, parameter in enumerate(policy.parameters()):
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    expected = plain_loss(policy, model_at(example / "base"), pairs, config)
    expected.backward()
    wanted = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.zero_grad()

    preferences = Preferences(config=config, reference=Plain(model_at(example / "base")))
    packing = Packing(per_token=1, per_square=1, causal_cost=1, masked_cost=1, is_always=True) if is_packed else None
    total = 0.0
    for micro_batch in micro_batches([each for pair in pairs for each in pair], max_tokens, packing):
        loss = preferences.loss(policy, micro_batch, num_pairs=len(pairs))
        loss.backward()
        total += float(loss.detach())
    assert total == pytest.approx(float(expected.detach()), rel=1e-6)
    for parameter, gradient in zip(policy.parameters(), wanted, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-5, atol=1e-8)


def micro_batches(samples: list[TrainSample], max_tokens: int, packing: Packing | None) -> list[MicroBatch]:
    (plan,) = plan_pairs([each.num_tokens for each in samples], max_tokens=max_tokens, packing=packing)
    made = []
    for rows in plan:
        order = [index for row in rows for index in row]
        own = [[order.index(index) for index in row] for row in rows]
        made.append(build_micro_batch([samples[i] for i in order], seq_len=96, device=torch.device("cpu"), rows=own))
    return made


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("is_packed", [False, True])
def test_both_responses_of_a_pair_are_in_one_micro_batch(world_size: int, is_packed: bool) -> None:
    lengths = [5, 9, 30, 3, 7, 7, 12, 40, 2, 3]
    packing = Packing(per_token=1, per_square=0, causal_cost=1, masked_cost=1, is_always=True) if is_packed else None
    plan = plan_pairs(lengths, max_tokens=64, world_size=world_size, packing=packing)
    assert len({len(own) for own in plan}) == 1 and len(plan) == world_size
    seen = []
    for rows in (rows for own in plan for rows in own):
        order = [index for row in rows for index in row]
        assert order[1::2] == [index + 1 for index in order[::2]] and all(index % 2 == 0 for index in order[::2])
        width = max((sum(lengths[index] for index in row) for row in rows), default=0)
        assert len(rows) * width <= 64 or len(order) == 2
        seen += order
    assert sorted(seen) == list(range(len(lengths)))


# Whole runs.


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    words = ["toma", "vo", "povi", "lan", "es", "nar", "kelu", "im", "so", "ba"]
    rows = [{"prompt": a + b, "chosen": (a + b)[::-1], "rejected": b} for a in words for b in words if a != b]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_config(example: Path, pairs: Path, output: Path, **changes: Any) -> SFTConfig:
    document: dict[str, Any] = {
        "model": {"name": str(example / "base")},
        "data": {"name": str(pairs), "batch_size": 8, "seq_len": 64},
        "dpo": {},
        "optim": {"lr": 2e-3},
        "max_steps": 6,
        "output_dir": str(output),
        "run": {"name": "sft"},
        "ckpt": {"interval": 2},
    }
    return SFTConfig.model_validate({**document, **changes})


def lines_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "sft" / "metrics.jsonl").read_text().splitlines()]


def train(config: SFTConfig) -> None:
    run_sft(config, gang=Gang(), on_step=lambda _: None)


def weights(output: Path) -> bytes:
    return (output / "sft" / "model" / "model.safetensors").read_bytes()


class KilledError(Exception):
    """The end of a run at a step."""


@pytest.mark.computes
@pytest.mark.parametrize("lora", [None, {"rank": 4, "dropout": 0.1}])
def test_a_run_that_was_ended_goes_on_to_the_same_bits(
    example: Path, pairs: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    model = {"name": str(example / "base")} | ({} if lora is None else {"lora": lora})
    val = {"interval": 3, "eval_on_start": True, "data": {"name": str(pairs)}}
    config = {"model": model, "val": val}
    train(make_config(example, pairs, tmp_path / "one", **config))

    def end(step: Any) -> None:
        if step.step == 4:
            raise KilledError

    with pytest.raises(KilledError):
        run_sft(make_config(example, pairs, tmp_path / "two", **config), gang=Gang(), on_step=end)
    train(make_config(example, pairs, tmp_path / "two", **config))
    assert weights(tmp_path / "two") == weights(tmp_path / "one")

    steps = [line for line in lines_of(tmp_path / "one") if "loss/mean" in line]
    again = [line for line in lines_of(tmp_path / "two") if "loss/mean" in line]
    names = ("loss/mean", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    assert [[line[name] for name in names] for line in again] == [[line[name] for name in names] for line in steps]
    # Before the first step the policy is the reference, up to the adapters' dropout.
    assert steps[0]["val/loss"] == pytest.approx(math.log(2), abs=1e-6)
    if lora is None:
        assert steps[0]["loss/mean"] == pytest.approx(math.log(2), abs=1e-6) and steps[0]["rewards/chosen"] == 0
        last = steps[-1]
        assert last["loss/mean"] < 0.6 and last["rewards/margins"] > 0.1 and last["rewards/accuracies"] > 0.8
        assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"])


@pytest.mark.computes
def test_another_start_model_is_refused(example: Path, pairs: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(example / "base", base)
    changes: dict[str, Any] = {"model": {"name": str(base)}, "max_steps": 2}
    train(make_config(example, pairs, tmp_path / "run", **changes))
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    model.save_pretrained(base)
    with pytest.raises(InvalidStateError) as raised:
        train(make_config(example, pairs, tmp_path / "run", **{**changes, "max_steps": 4}))
    assert raised.value.reason == "CHECKPOINT_BASE_DIFFERS"


def test_keys_without_a_meaning_for_pairs_are_refused(example: Path, pairs: Path, tmp_path: Path) -> None:
    data = {"name": str(pairs), "pack_function": "cat", "loss_mask": {"user": True}, "columns": {"messages": "m"}}
    with pytest.raises(ValidationError) as raised:
        make_config(example, pairs, tmp_path, data=data)
    for key in ("data.pack_function", "data.loss_mask", "data.columns.messages"):
        assert key in str(raised.value)


@pytest.mark.parametrize("dpo", [{"beta": 0.0}, {"label_smoothing": 0.5}, {"label_smoothing": -0.1}, {"loss": "ipo"}])
def test_values_out_of_bounds_and_unknown_keys_are_refused(
    example: Path, pairs: Path, tmp_path: Path, dpo: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError, match=next(iter(dpo))):
        make_config(example, pairs, tmp_path, dpo=dpo)
