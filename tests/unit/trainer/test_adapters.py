"""Many adapters on one base: each has the bits of the adapter alone, whatever it shares a forward with."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from millrace.config.sections.loss import LossConfig
from millrace.config.sections.trainer import LoraConfig, OptimConfig, SchedulerConfig
from millrace.errors import AlreadyExistsError, InvalidSpecError, InvalidStateError, NotFoundError
from millrace.rollouts.types import TrainSample, Truncation
from millrace.trainer.learning.adapters import AdapterPool, Loss, Work
from millrace.trainer.learning.batch import MicroBatch, build_micro_batch
from millrace.trainer.learning.forward import OnePass, token_logprobs
from millrace.trainer.learning.optimizer import AdamParams, PolicyOptimizer
from millrace.trainer.losses import Objective, token_losses
from millrace.trainer.model.lora import add_adapters, trained_tensors
from millrace.trainer.model.pretrained import load_model
from millrace_testing import lanes
from millrace_testing.trainer.families import FAMILIES, make_family

CPU = torch.device("cpu")
ADAM = AdamParams(lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, max_norm=None)
STEPS = 3
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]


@pytest.fixture(autouse=True)
def strict() -> Any:
    """Compute as `set_determinism` has it for a strict run on a CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def sample(length: int, seed: int, *, vocabulary: int = 60, **changes: Any) -> TrainSample:
    rng = np.random.default_rng((length, seed))
    mask = (np.arange(length) >= min(2, length - 1)).astype(np.uint8)
    values: dict[str, Any] = {
        "token_ids": rng.integers(0, vocabulary, length).astype(np.int32),
        "loss_mask": mask,
        "inference_logprobs": (mask * rng.uniform(-5.0, -3.0, length)).astype(np.float32),
        "advantages": (mask * rng.normal()).astype(np.float32),
        "ordinal": seed,
        "member": 0,
        "attempt": 0,
        "env": "e",
        "reward": 0.0,
        "temperature": (0.7, 1.0)[seed % 2],
        "min_version": 0,
        "max_version": 0,
        "lineage": 0,
    }
    return TrainSample(**{**values, **changes})


def micro_batch(*lengths: int, seed: int, is_packed: bool = False, **changes: Any) -> MicroBatch:
    samples = [sample(length, seed + at, **changes) for at, length in enumerate(lengths)]
    rows = [list(range(len(lengths)))] if is_packed else None
    return build_micro_batch(samples, seq_len=64, rows=rows, device=CPU)


def by_objective(config: LossConfig) -> Loss:
    """Return a loss of a run, whose divisor is that of the micro-batch."""

    def loss(batch: MicroBatch, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor) -> torch.Tensor:
        entropy = entropy_BT if config.entropy_coef else None
        objective = Objective(loss_of=token_losses, config=config, rl_divisor=batch.num_rl_tokens, num_ce_tokens=1)
        return objective(batch.loss_inputs(logprobs_BT, entropy_BT=entropy))[1]

    return loss


def likelihood(batch: MicroBatch, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood, a sum over tokens."""
    return -(logprobs_BT * batch.loss_mask_BT).sum()


def of_whole_samples(batch: MicroBatch, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor) -> torch.Tensor:
    """Return a loss in which a token's share depends on the others of its sample."""
    return -(logprobs_BT * batch.loss_mask_BT).sum(1).sigmoid().sum()


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """An adapter, what it learns in each step, and how."""

    name: str
    lora: LoraConfig
    work: tuple[Work, ...]
    adam: AdamParams | None = ADAM
    optim: OptimConfig | None = None
    scheduler: SchedulerConfig | None = None

    @property
    def seed(self) -> int:
        return sum(self.name.encode())

    def add_to(self, pool: AdapterPool) -> None:
        pool.add(self.name, self.lora, seed=self.seed, optim=self.optim, scheduler=self.scheduler, max_steps=STEPS)


def tenant(
    name: str, loss: Loss, *batches: tuple[int, ...], lora: dict[str, Any], is_by_token: bool = True, **keys: Any
) -> Tenant:
    """Make a tenant that learns micro-batches with samples of these lengths, of other tokens in every step."""
    own, given = {"is_packed", "truncation"} & keys.keys(), dict(keys)
    changes = {key: given.pop(key) for key in own}
    learned = given.pop("is_entropy_learned", False)
    work = tuple(
        Work(
            adapter=name,
            micro_batches=[
                micro_batch(*lengths, seed=100 * step + 10 * at + ord(name[0]), **changes)
                for at, lengths in enumerate(batches)
            ],
            loss=loss,
            is_by_token=is_by_token,
            is_entropy_learned=learned,
        )
        for step in range(STEPS)
    )
    return Tenant(name=name, lora=LoraConfig(**lora), work=work, **given)


def tenants() -> list[Tenant]:
    """Return eight tenants: other ranks, scales, targets, losses, optimizers and shapes of data."""
    entropy, sequence = LossConfig(entropy_coef=0.1), LossConfig(type="gspo", clip_low=0.2, clip_high=0.2)
    warm = SchedulerConfig(type="cosine", warmup_steps=1)
    return [
        tenant("a", likelihood, (19, 12), (23,), lora={"rank": 4, "alpha": 8.0}),
        tenant("b", by_objective(LossConfig()), (17, 9, 5), lora={"rank": 16, "target_modules": ATTENTION}),
        tenant(
            "c",
            by_objective(entropy),
            (16,),
            (30, 8),
            (21,),
            lora={"rank": 1, "target_modules": MLP},
            is_entropy_learned=True,
        ),
        tenant("d", by_objective(sequence), (25, 3), lora={"rank": 8}, is_by_token=False),
        tenant("e", of_whole_samples, (9, 14, 6), lora={"rank": 2, "alpha": 1.0}, is_by_token=False, is_packed=True),
        tenant(
            "f",
            likelihood,
            (40,),
            lora={"rank": 8, "target_modules": ["q_proj"]},
            adam=None,
            optim=OptimConfig(lr=1e-2, max_norm=0.1),
            scheduler=warm,
        ),
        tenant(
            "g",
            by_objective(LossConfig(type="cispo", clip_low=0.2, clip_high=0.2)),
            (18, 18),
            lora={"rank": 3, "target_modules": ["down_proj", "v_proj"]},
            adam=None,
            optim=OptimConfig(type="sgd", lr=0.1),
            truncation=Truncation(top_k=40),
        ),
        tenant("h", likelihood, (5,), (33, 2), lora={"rank": 4}, adam=replace(ADAM, weight_decay=0.1, max_norm=0.5)),
    ]


def learn_together(pool: AdapterPool, them: list[Tenant]) -> dict[str, list[Any]]:
    """Let tenants learn in calls of all of them, or of some; return the results of each by its steps."""
    found: dict[str, list[Any]] = {each.name: [] for each in them}
    for step in range(STEPS):
        # In turns in another order, so that neighbours and places in a forward differ from step to step.
        order = them[step:] + them[:step]
        for some in (order[: 5 + step], order[5 + step :]):
            results = pool.forward_backward([each.work[step] for each in some])
            for each, result in zip(some, results, strict=True):
                found[each.name].append(result)
                pool.step(each.name, each.adam)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def forwards_of(base: nn.Module) -> list[int]:
    """Return a list that gets the number of tokens of every forward of the base and of its views from now on."""
    counts = list[int]()
    embedding: Any = base.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    embedding.register_forward_hook(lambda _module, args, _result: counts.append(args[0].numel()))
    return counts


def alone(example: Path, each: Tenant) -> tuple[dict[str, torch.Tensor], list[list[torch.Tensor]]]:
    """Train a tenant with the parts that a run of its own has; return its weights, and log-probs by step."""
    model = load_model(example / "base")
    add_adapters(model, each.lora, seed=each.seed)
    optimizer = PolicyOptimizer(
        model, optim=each.optim or OptimConfig(), scheduler=each.scheduler or SchedulerConfig(), max_steps=STEPS
    )
    logprobs = list[list[torch.Tensor]]()
    for step, work in enumerate(each.work):
        logprobs.append([])
        for batch in work.micro_batches:
            one_pass = OnePass(lambda *both_BT, batch=batch, work=work: work.loss(batch, *both_BT))
            both_BT = token_logprobs(
                model,
                batch,
                is_entropy_learned=work.is_entropy_learned,
                one_pass=one_pass if work.is_by_token else None,
            )
            work.loss(batch, *both_BT).backward()
            logprobs[-1].append(both_BT[0].detach())
        _ = optimizer.step(step) if each.adam is None else optimizer.step_as(step, each.adam)
    return trained_tensors(model), logprobs


def test_eight_adapters_beside_each_other_have_the_bits_of_each_alone(example: Path) -> None:
    base, them = load_model(example / "base"), tenants()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    counts = forwards_of(base)
    pool = AdapterPool(base, max_tokens=160)
    assert pool.why_alone is None
    for each in them:
        each.add_to(pool)
    counts.clear()
    found = learn_together(pool, them)
    # The results below were shared for: half as many forwards as micro-batches, at most, each with what it may have.
    assert len(counts) <= STEPS * sum(len(each.work[0].micro_batches) for each in them) / 2
    assert max(counts) <= 160
    for each in them:
        weights, logprobs = alone(example, each)
        assert_same(trained_tensors(pool.model(each.name)), weights)
        assert any(tensor.any() for name, tensor in weights.items() if name.endswith("lora_B.weight"))
        assert pool.num_steps(each.name) == STEPS
        for results, expected in zip(found[each.name], logprobs, strict=True):
            assert all(torch.equal(a.logprobs_BT, b) for a, b in zip(results, expected, strict=True))
    assert_same(base.state_dict(), before)


def test_an_adapter_goes_on_from_its_state_among_others(example: Path) -> None:
    """Of two calls before a step, the first is in the state; the second has other neighbours."""
    dropped: dict[str, Any] = {"rank": 4, "dropout": 0.25}
    them = [
        tenant("a", likelihood, (19, 12), lora={"rank": 4}),
        tenant("b", likelihood, (22,), lora=dropped),
        tenant("c", likelihood, (17, 30), lora={"rank": 2}),
    ]
    first = AdapterPool(load_model(example / "base"), max_tokens=200)
    for each in them:
        each.add_to(first)
    first.forward_backward([each.work[0] for each in them])
    for each in them:
        first.step(each.name, each.adam)
    first.forward_backward([each.work[1] for each in them])
    states = {each.name: first.state(each.name) for each in them}
    kept = copy.deepcopy(states)
    torch.manual_seed(7)  # whatever the process draws meanwhile
    second = AdapterPool(load_model(example / "base"), max_tokens=200)
    for each in reversed(them[:2]):
        each.add_to(second)
        second.load_state(each.name, states[each.name])
    for pool, some in ((first, them), (second, them[1::-1])):
        pool.forward_backward([each.work[2] for each in some])
        for each in some:
            pool.step(each.name, each.adam)
    for each in them[:2]:
        assert_same(second.state(each.name), first.state(each.name))
        assert second.num_steps(each.name) == 2
        assert_same(states[each.name], kept[each.name])  # copies, which later steps do not change
    assert "rng.host" in states["b"] and "rng.host" not in states["a"]


def test_weights_alone_begin_anew(example: Path) -> None:
    each = tenant("a", likelihood, (19, 12), lora={"rank": 4})
    pool = AdapterPool(load_model(example / "base"), max_tokens=200)
    each.add_to(pool)
    pool.forward_backward([each.work[0]])
    pool.step("a", ADAM)
    weights = {name: tensor for name, tensor in pool.state("a").items() if name.startswith("model.")}
    pool.forward_backward([each.work[1]])
    pool.load_weights("a", weights)
    state = pool.state("a")
    assert_same({name: state[name] for name in weights}, weights)
    assert not any(tensor.any() for name, tensor in state.items() if name.startswith(("optim.", "steps")))
    assert not any(name.startswith("grad.") for name in state)


def test_dropout_is_drawn_as_by_a_run_of_its_own(example: Path) -> None:
    """And forwards without learning draw none."""
    each = tenant("a", likelihood, (19, 12), (30,), lora={"rank": 4, "dropout": 0.5})
    beside = tenant("b", likelihood, (22,), (21,), lora={"rank": 4, "dropout": 0.5})
    lone, shared = (AdapterPool(load_model(example / "base"), max_tokens=200) for _ in range(2))
    each.add_to(lone)
    for tenant_ in (beside, each):
        tenant_.add_to(shared)
    evaluated = lone.forward(each.work[:1])[0]
    lone.forward_backward(each.work[:1])
    shared.forward_backward([beside.work[0], each.work[0]])
    assert_same(lone.state("a"), shared.state("a"))
    assert torch.equal(evaluated[0].logprobs_BT, lone.forward(each.work[:1])[0][0].logprobs_BT)
    assert not torch.equal(shared.state("b")["rng.host"], shared.state("a")["rng.host"])


def test_a_loss_that_is_not_finite_is_its_adapters_own(example: Path) -> None:
    good, bad = (tenant(name, likelihood, (19, 12), lora={"rank": 4}) for name in "ab")
    work = replace(bad.work[0], loss=lambda batch, logprobs, entropy: likelihood(batch, logprobs, entropy) * np.nan)
    pool, lone = (AdapterPool(load_model(example / "base"), max_tokens=200) for _ in range(2))
    for each in (good, bad):
        each.add_to(pool)
    good.add_to(lone)
    pool.forward_backward([good.work[0], work])
    lone.forward_backward([good.work[0]])
    before = trained_tensors(pool.model("b"))["model.layers.0.mlp.up_proj.lora_A.weight"].clone()
    reports = {name: pool.step(name, ADAM) for name in "ab"}
    assert (reports["a"].num_skipped, reports["b"].num_skipped) == (0, 1)
    lone.step("a", ADAM)
    assert_same(pool.state("a"), lone.state("a"))
    assert torch.equal(trained_tensors(pool.model("b"))["model.layers.0.mlp.up_proj.lora_A.weight"], before)


@pytest.mark.parametrize(
    "loss", [lambda *_: 1.0, lambda *_: torch.tensor(1.0), lambda batch, logprobs, entropy: logprobs]
)
def test_a_loss_that_is_none_is_refused_and_changes_nothing(example: Path, loss: Callable[..., Any]) -> None:
    good, bad = (tenant(name, likelihood, (19, 12), (17,), lora={"rank": 4}) for name in "ab")
    pool = AdapterPool(load_model(example / "base"), max_tokens=100)
    for each in (good, bad):
        each.add_to(pool)
    pool.forward_backward([good.work[0]])
    before = {name: pool.state(name) for name in "ab"}
    # The first micro-batches are learned from before the second one of the other adapter is refused.
    late = replace(
        bad.work[0],
        loss=lambda batch, *both: likelihood(batch, *both) if len(batch.env_B) > 1 else loss(batch, *both),
        is_by_token=False,
    )
    with pytest.raises(InvalidSpecError, match="adapter b") as caught:
        pool.forward_backward([good.work[1], late])
    assert caught.value.reason == "LOSS_INVALID"
    for name in "ab":
        assert_same(pool.state(name), before[name])


def test_names_and_state_are_checked(example: Path) -> None:
    pool = AdapterPool(load_model(example / "base"), max_tokens=100)
    spec = pool.add("a", LoraConfig(rank=4, target_modules=ATTENTION), seed=1)
    assert (spec.rank, sorted(spec.target_modules)) == (4, sorted(ATTENTION))
    with pytest.raises(AlreadyExistsError, match="'a'"):
        pool.add("a", LoraConfig(), seed=2)
    with pytest.raises(InvalidStateError, match="which other adapters share") as caught:
        pool.add("b", LoraConfig(modules_to_save=["lm_head"]), seed=1)
    assert caught.value.reason == "LORA_SAVED_SHARED"
    pool.add("b", LoraConfig(rank=4), seed=1)
    state = pool.state("a")
    for other in (pool.state("b"), {k: v for k, v in state.items() if k != "steps"}, state | {"steps": torch.ones(2)}):
        with pytest.raises(InvalidStateError, match="is not that of adapter 'a'") as caught:
            pool.load_state("a", other)
        assert caught.value.reason == "ADAPTER_STATE_MISFIT"
    assert_same(pool.state("a"), state)
    pool.remove("a")
    assert pool.names == ("b",)
    with pytest.raises(NotFoundError, match="'a'"):
        pool.forward([tenant("a", likelihood, (9,), lora={}).work[0]])


UNLIKE = {
    **dict.fromkeys(("cohere2", "exaone4", "gemma3_text", "ministral", "olmo3"), "whole row"),
    **dict.fromkeys(("mistral", "starcoder2"), "part of the row"),
    "gemma2": "cannot be replaced",
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), "experts"),
    **dict.fromkeys(("cohere", "granite"), "changes its head's output"),
    "phi3": "longest row",
}
"""Families whose micro-batches share no forwards, and why."""


@pytest.mark.parametrize("family", lanes.by_default(FAMILIES, ["deepseek_v3", "granite", "mistral"]))
def test_every_family_computes_as_alone(tmp_path: Path, family: str) -> None:
    """Some share no forwards, because of experts, windows, or factors of the logits: they take turns."""
    base = make_family(family, tmp_path)
    counts, unlike = {"a": (21, 9), "b": (17,), "c": (8, 11, 30)}, UNLIKE.get(family)

    def pool_of(*names: str) -> AdapterPool:
        pool = AdapterPool(load_model(base), max_tokens=500)
        head: Any = pool.base.get_output_embeddings()  # pyright: ignore[reportCallIssue]
        inner = {name for name, each in pool.base.named_modules() if type(each) is nn.Linear and each is not head}
        for name in names:
            targets = sorted({each.rpartition(".")[2] for each in inner})
            pool.add(name, LoraConfig(rank=2 + ord(name) % 3, target_modules=targets), seed=ord(name))
        return pool

    work = [
        Work(adapter=name, micro_batches=[micro_batch(*lengths, seed=at)], loss=likelihood, is_by_token=True)
        for at, (name, lengths) in enumerate(counts.items())
    ]
    shared = pool_of(*counts)
    if unlike is None:
        assert shared.why_alone is None
    else:
        assert unlike in (shared.why_alone or "")
    shared.forward_backward(work)
    for each in work:
        lone = pool_of(each.adapter)
        lone.forward_backward([each])
        assert_same(shared.state(each.adapter), lone.state(each.adapter))
