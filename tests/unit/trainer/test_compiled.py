"""Compiled blocks: the same gradients, few graphs whatever the shapes, and eager blocks where compiling fails."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from millrace.config.load import validate_document
from millrace.config.sections.sft import SFTConfig
from millrace.config.sections.trainer import ActivationCheckpointConfig, CompileConfig
from millrace.errors import InternalError, InvalidSpecError
from millrace.telemetry import waits
from millrace.trainer.learning.batch import MicroBatch, build_micro_batch, fake_sample
from millrace.trainer.learning.forward import token_logprobs
from millrace.trainer.learning.plan import Rows
from millrace.trainer.model.compiled import compile_blocks, take_failures
from millrace.trainer.model.memory import checkpoint_activations

pytestmark = pytest.mark.computes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    """Yield what one test compiled is none of the next one's."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that computes graphs as they were traced, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def model(*, layers: int = 2) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            initializer_range=0.2,
        )
    ).eval()


def micro_batch(lengths: Sequence[int], rows: Rows | None = None) -> MicroBatch:
    samples = [fake_sample(length, vocabulary=64) for length in lengths]
    for number, sample in enumerate(samples):
        sample.token_ids[:] = np.random.default_rng(number).integers(0, 64, len(sample.token_ids))
    return build_micro_batch(samples, seq_len=1024, device=CPU, rows=rows)


def learned(trained: nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return log-probs and gradients."""
    trained.zero_grad()
    logprobs_BT, _ = token_logprobs(trained, batch)
    logprobs_BT[batch.loss_mask_BT].mean().backward()
    return logprobs_BT.detach(), [each.grad.clone() for each in trained.parameters() if each.grad is not None]


def assert_same(one: nn.Module, other: nn.Module, batch: MicroBatch) -> None:
    (logprobs, grads), (expected, expected_grads) = learned(one, batch), learned(other, batch)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-5)
    assert len(grads) == len(expected_grads) > 0
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert float((grad - expected_grad).abs().max()) <= 2e-5 * max(float(expected_grad.abs().max()), 1e-3)


PADDED, PACKED = None, [[0, 1], [2]]


@pytest.mark.parametrize(
    ("mode", "rows"),
    [
        pytest.param(None, PACKED, id="packed", marks=pytest.mark.long),
        pytest.param("full", PADDED, id="full-padded", marks=pytest.mark.long),
        pytest.param("selective", PACKED, id="selective-packed"),
        pytest.param(None, PADDED, id="padded", marks=pytest.mark.long),
        pytest.param("full", PACKED, id="full-packed", marks=pytest.mark.long),
        pytest.param("selective", PADDED, id="selective-padded", marks=pytest.mark.long),
    ],
)
def test_the_same_gradients(mode: Any, rows: Rows | None) -> None:
    compiled, eager = model(), model()
    if mode is not None:
        checkpoint_activations(compiled, ActivationCheckpointConfig(mode=mode))
    counting = Counting()
    compile_blocks(compiled, CompileConfig(), backend=counting)
    assert_same(compiled, eager, micro_batch([37, 20, 50], rows))
    assert counting.graphs and not take_failures(compiled)


@pytest.mark.long
def test_autograd_of_a_compiler_gives_the_same_gradients() -> None:
    compiled, eager = model(), model()
    compile_blocks(compiled, CompileConfig(fullgraph=True), backend="aot_eager")
    assert_same(compiled, eager, micro_batch([70, 20]))
    assert not take_failures(compiled)


def test_new_shapes_are_not_compiled_again() -> None:
    compiled, counting = model(layers=2), Counting()
    compile_blocks(compiled, CompileConfig(), backend=counting)

    def take(*lengths: int) -> None:
        one_per_row: Rows = [[place] for place in range(len(lengths))]
        packed: Rows = [[0, *range(2, len(lengths))], [1]]
        for rows in (one_per_row, packed) if len(lengths) > 2 else (one_per_row,):
            learned(compiled, micro_batch(lengths, rows))
        with torch.no_grad():
            token_logprobs(compiled, micro_batch(lengths))

    take(5)
    take(40, 30)
    take(40, 30, 20)
    known = counting.graphs
    assert known <= 8
    for lengths in [(65,), (128, 3), (130, 129, 128), (33, 32, 31, 7, 2)]:
        take(*lengths)
    assert counting.graphs == known


def test_a_block_that_does_not_compile_runs_eagerly_and_is_told_of_once() -> None:
    asked: list[int] = []

    def broken(graph: Any, inputs: Any) -> Callable[..., Any]:
        asked.append(1)
        raise RuntimeError("no working C++ compiler found\nin any of these places")

    compiled, eager = model(), model()
    compile_blocks(compiled, CompileConfig(), backend=broken)
    assert_same(compiled, eager, micro_batch([37, 20]))
    (failure,) = take_failures(compiled)
    assert "Qwen3DecoderLayer" in failure and "no working C++ compiler found" in failure
    assert_same(compiled, eager, micro_batch([80]))
    assert len(asked) == 1 and not take_failures(compiled)


def test_what_is_wrong_with_a_block_itself_is_no_failure_of_the_compiler() -> None:
    compiled = model()
    compile_blocks(compiled, CompileConfig(), backend="eager")
    with pytest.raises(RuntimeError, match="size of tensor a"):
        compiled.model.layers[0](torch.zeros(1, 4, 7), position_embeddings=(torch.ones(4, 16), torch.ones(4, 16)))  # type: ignore[union-attr,operator,index]
    assert not take_failures(compiled)


def test_models_are_not_asked_for_positions_that_they_do_not_have() -> None:
    compiled, eager = model(), model()
    compiled.config.max_position_embeddings = 70  # type: ignore[union-attr]
    seen: list[torch.Size] = []
    compiled.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))  # type: ignore[union-attr,operator,index]
    compile_blocks(compiled, CompileConfig(), backend="eager")
    for length in (60, 68, 75):
        assert_same(compiled, eager, micro_batch([length]))
    assert [shape[1] for shape in seen] == [64, 70, 75]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_inductor_computes_the_same_and_without_a_compiler_the_blocks_run_eagerly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    import shutil

    from torch._inductor import config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if shutil.which("g++") or shutil.which("clang++"):
        compiled = model(layers=1)
        compile_blocks(compiled, CompileConfig(fullgraph=True))
        assert_same(compiled, model(layers=1), micro_batch([37, 20]))
        assert not take_failures(compiled)
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr(inductor.cpp, "cxx", (None, str(tmp_path / "no-such-compiler")))
    compiled = model(layers=1)
    compile_blocks(compiled, CompileConfig())
    assert_same(compiled, model(layers=1), micro_batch([37, 20]))
    (failure,) = take_failures(compiled)
    assert "run eagerly" in failure


def test_strict_is_refused_with_the_reason() -> None:
    document = {
        "orchestrator": {"env": [{"id": "a"}], "rollouts_per_example": 2},
        "trainer": {"model": {"compile": {}}, "determinism": "strict"},
    }
    with pytest.raises(InvalidSpecError, match="another start may have other bits"):
        validate_document(document)
    assert validate_document(document | {"trainer": {"model": {"compile": {}}}}).trainer.model.compile is not None


def test_ranks_that_share_layers_are_refused_with_it_and_whole_graphs_with_exchanges() -> None:
    document = {"orchestrator": {"env": [{"id": "a"}], "rollouts_per_example": 2}}

    def refusal(**model: Any) -> tuple[str, str]:
        with pytest.raises(InvalidSpecError) as told:
            validate_document({**document, "trainer": {"model": model}})
        with pytest.raises(InvalidSpecError) as of_sft:
            validate_document({"model": model}, SFTConfig)
        first, second = told.value.violations[0], of_sft.value.violations[0]
        assert (first.field, first.message) == (f"trainer.{second.field}", second.message)
        return first.field, first.message

    field, message = refusal(compile={}, tp=2)
    assert field == "trainer.model.compile" and "with tp above 1, whose exchanges are not proved" in message
    field, message = refusal(compile={"fullgraph": True}, cp=2, ep=2)
    assert field == "trainer.model.compile.fullgraph" and "with cp and ep above 1" in message and "divide" in message
    for allowed in ({"dp_replicate": 2}, {"cp": 2}, {"ep": 2}, {"cp": 2, "ep": 4}):
        validate_document({**document, "trainer": {"model": {"compile": {}, **allowed}}})
        validate_document({"model": {"compile": {}, **allowed}}, SFTConfig)
    validate_document({**document, "trainer": {"model": {"tp": 2}}})


def test_of_blocks_with_exchanges_a_part_that_does_not_compile_runs_eagerly_and_nothing_twice() -> None:
    """A second call of a whole block would exchange a second time, with ranks that do not."""
    exchanged: list[int] = []
    failing: list[int] = []

    @torch.compiler.disable
    def exchange(hidden: torch.Tensor) -> torch.Tensor:
        exchanged.append(1)
        return hidden

    def broken_once(graph: Any, inputs: Any) -> Callable[..., Any]:
        if exchanged and not failing:
            failing.append(1)
            raise RuntimeError("no room for the kernel\nin any of these places")
        return graph.forward

    compiled, eager = model(), model()
    for block in (*compiled.model.layers, *eager.model.layers):  # type: ignore[union-attr]
        block.input_layernorm.register_forward_hook(lambda module, args, out: exchange(out))
    compile_blocks(compiled, CompileConfig(), has_exchanges=True, backend=broken_once)
    batch = micro_batch([37, 20])
    assert_same(compiled, eager, batch)
    assert failing and len(exchanged) == 4, "two layers of two models"
    assert take_failures(compiled) == ["a part of the blocks does not compile and runs eagerly: no room for the kernel"]
    assert_same(compiled, eager, batch)
    assert not take_failures(compiled)


def test_a_tracer_that_fails_beside_exchanges_ends_the_step_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import InternalTorchDynamoError

    compiled = model()

    def failing(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            raise InternalTorchDynamoError("a bug of the tracer")

        return forward

    monkeypatch.setattr(torch, "compile", failing)
    compile_blocks(compiled, CompileConfig(), has_exchanges=True, backend="eager")
    with pytest.raises(InternalError, match=r"Qwen3DecoderLayer cannot be traced.*a bug of the tracer") as told:
        learned(compiled, micro_batch([5]))
    assert told.value.reason == "BLOCKS_UNTRACEABLE" and "trainer.model.compile" in told.value.remedy


def test_a_graph_that_is_being_compiled_is_a_wait() -> None:
    """`millrace run why` says why the first step takes so long."""
    seen: list[str] = []

    def looking(graph: Any, inputs: Any) -> Callable[..., Any]:
        seen.extend(wait.reason for wait in waits.snapshot("trainer") if "compiled" in wait.reason)
        return graph.forward

    compiled = model()
    compile_blocks(compiled, CompileConfig(), backend=looking)
    learned(compiled, micro_batch([10, 12]))
    assert seen and all(re.fullmatch(r"a graph of \d+ operations to be compiled", reason) for reason in seen)
    assert not [wait for wait in waits.snapshot("trainer") if "compiled" in wait.reason]
