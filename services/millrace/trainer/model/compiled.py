"""`torch.compile` of a model's blocks: each by itself, in place, with unchanged names of parameters.

One graph serves every number and length of rows: both are symbols. Lengths are rounded up (`width_of`), because a
compiler specialises on properties of a symbol (whether 16 divides it) and would otherwise compile again for other
batches. One row and several, packed rows, and a forward without gradient have a graph each: about eight in all, however
long a run lasts.

A compiler is foreign code that needs a C++ compiler or Triton. If it fails, the blocks of that class run eagerly from
then on, and `Compilation.take_failures` says why.

Ranks that share rows or experts exchange tensors within a block. A block is compiled in parts then, of which none has
an exchange, and a part that does not compile runs eagerly by itself: a whole block that one rank computed a second time
would exchange a second time, with ranks that do not.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import lookup_backend
from torch._dynamo.exc import RestartAnalysis, SkipFrame, TorchDynamoException
from torch._functorch import config as functorch_config

from millrace.config.sections.trainer import CompileConfig
from millrace.errors import InternalError
from millrace.telemetry import waits
from millrace.trainer.model.memory import blocks_of

logger = logging.getLogger(__name__)

WIDTH = 64
"""Lengths of rows are multiples of it if blocks are compiled."""
_MOST_GRAPHS = 32
_LONGEST_CAUSE = 300

Backend = str | Callable[..., Any]


_PART_FAILURES: list[str] = []
"""Why parts of blocks did not compile, since `take_failures` was last called: a compiler does not know the model."""


class Compilation:
    """The failures of compiling the blocks of one model."""

    def __init__(self, *, has_exchanges: bool = False) -> None:
        """Begin without failures. `has_exchanges` says whether ranks exchange tensors within a block."""
        self._failures: list[str] = []
        self._eager = set[str]()
        self._has_exchanges = has_exchanges

    def take_failures(self) -> list[str]:
        """Return the failures since the last call, a sentence for each class of block, and forget them."""
        taken, self._failures = self._failures, []
        if self._has_exchanges:
            parts, _PART_FAILURES[:] = dict.fromkeys(_PART_FAILURES), []
            taken += [f"a part of the blocks does not compile and runs eagerly: {cause}" for cause in parts]
        return taken

    def forward(self, block: nn.Module, compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward for `block` that calls `compiled`, or `eager` once a class of block has failed to compile.

        A failure is recorded for all blocks of the same class, and the call that fails returns the result of `eager`.
        With exchanges within blocks nothing is computed twice: parts that do not compile run eagerly by themselves, and
        a failure of the tracer raises InternalError (BLOCKS_UNTRACEABLE). Raises torch.OutOfMemoryError, and what the
        block itself raises.
        """
        name = type(block).__name__

        @functools.wraps(eager)
        def forward(*args: Any, **kwargs: Any) -> Any:
            """Run the block compiled, or eagerly if its class has failed to compile."""
            if name in self._eager:
                return eager(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # foreign code: a compiler fails with whatever it likes
                if self._has_exchanges and isinstance(error, TorchDynamoException):
                    raise _untraced(name, error) from error
                if self._has_exchanges:
                    raise
                result = eager(*args, **kwargs)  # raises if the block itself is wrong
                self._fail(name, error)
                return result

        return forward

    def _fail(self, name: str, error: Exception) -> None:
        """Record that blocks of class `name` run eagerly from now on because of `error`, and log a warning."""
        self._eager.add(name)
        logger.warning("a block does not compile and runs eagerly", extra={"block": name, "error": str(error)})
        self._failures.append(f"blocks of class {name} do not compile and run eagerly from here on: {_cause_of(error)}")


def _cause_of(error: Exception) -> str:
    """Return the first line of what a compiler raised, shortened."""
    inner = getattr(error, "inner_exception", error)  # what the backend raised
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()] or [type(inner).__name__]
    return lines[0][:_LONGEST_CAUSE]


def _untraced(name: str, error: Exception) -> InternalError:
    """Make the error that the tracer failed with `error` in a block of class `name` that exchanges tensors."""
    return InternalError(
        f"blocks of class {name} cannot be traced, and what they had exchanged by then is unknown: {_cause_of(error)}",
        reason="BLOCKS_UNTRACEABLE",
        remedy="leave trainer.model.compile out",
    )


_of_model = WeakKeyDictionary[nn.Module, Compilation]()


def compile_blocks(
    model: nn.Module, config: CompileConfig | None, *, has_exchanges: bool = False, backend: Backend = "inductor"
) -> None:
    """Replace the forward of every block, in place, by one that compiles at its first call.

    Do nothing without `config`. Call it after activation checkpointing and before sharding, so that FSDP's hooks are
    outside of the graphs. `has_exchanges` says whether ranks will exchange tensors within a block, which `cut_rows` and
    `cut_experts` keep out of the graphs. `backend` is a name of `torch.compile`'s or a function of one's own. Changes
    dynamo's settings of the whole process.
    """
    if config is None:
        return
    # Past its limit (8 in torch 2.13) dynamo runs a function eagerly without an error, unless `fullgraph` is set.
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, _MOST_GRAPHS)
    # Compile the backward together with the forward, where a failure can be handled, and not in autograd's backward.
    functorch_config.force_non_lazy_backward_lowering = True
    compilation = _of_model[model] = Compilation(has_exchanges=has_exchanges)
    backend = _waited_for(backend, falls_back=has_exchanges)
    for block in blocks_of(model):
        eager = block.forward
        compiled = torch.compile(eager, dynamic=True, fullgraph=config.fullgraph, backend=backend)
        block.__dict__["forward"] = compilation.forward(block, compiled, eager)


@functools.cache  # dynamo keeps graphs by backend: a new wrapper would compile all graphs again
def _waited_for(backend: Backend, *, falls_back: bool) -> Callable[..., Any]:
    """Return the compiler `backend` wrapped so that each compilation is registered as a wait.

    A first step may compile for minutes. With `falls_back` a graph that does not compile is returned as it was traced,
    to be run eagerly, and the cause is kept for `take_failures`.
    """
    compile_graph = lookup_backend(backend)

    @functools.wraps(compile_graph)
    def compiled(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **kwargs: Any) -> Callable[..., Any]:
        with waits.waiting(f"a graph of {len(graph.graph.nodes)} operations to be compiled"):
            try:
                return compile_graph(graph, inputs, **kwargs)
            except Exception as error:  # foreign code: a compiler fails with whatever it likes
                # By the latter two a compiler asks the tracer to begin anew, or to leave a function out.
                if not falls_back or isinstance(error, torch.OutOfMemoryError | RestartAnalysis | SkipFrame):
                    raise
                logger.warning("a part of a block does not compile and runs eagerly", extra={"error": str(error)})
                _PART_FAILURES.append(_cause_of(error))
                return graph.forward

    return compiled


def take_failures(model: nn.Module) -> list[str]:
    """Return a sentence for each class of block that failed to compile since the last call.

    Empty if none is compiled.
    """
    compilation = _of_model.get(model)
    return [] if compilation is None else compilation.take_failures()


def is_compiled(model: nn.Module) -> bool:
    """Return whether `compile_blocks` was called for the model with a config, also if compiling failed later."""
    return model in _of_model


def width_of(model: Any, width: int) -> int:
    """Return the length to which rows of `width` tokens are padded: more than `width` only if blocks are compiled.

    It is a multiple of `WIDTH` then, if the model has that many positions.
    """
    if not is_compiled(model):
        return width
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or width
    return max(min(-(-width // WIDTH) * WIDTH, most), width)
