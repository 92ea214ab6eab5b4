"""`torch.compile` of a model's blocks: each by itself, in place, with unchanged names of parameters.

One graph serves every number and length of rows: both are symbols. Lengths are rounded up (`width_of`), because a
compiler specialises on properties of a symbol (whether 16 divides it) and would otherwise compile again for other
batches. One row and several, packed rows, and a forward without gradient have a graph each: about eight in all, however
long a run lasts.

A compiler is foreign code that needs a C++ compiler or Triton. If it fails, the blocks of that class run eagerly from
then on, and `Compilation.take_failures` says why.
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
from torch._functorch import config as functorch_config

from millrace.config.sections.trainer import CompileConfig
from millrace.telemetry import waits
from millrace.trainer.model.memory import blocks_of

logger = logging.getLogger(__name__)

WIDTH = 64
"""Lengths of rows are multiples of it if blocks are compiled."""
_MOST_GRAPHS = 32
_LONGEST_CAUSE = 300

Backend = str | Callable[..., Any]


class Compilation:
    """The failures of compiling the blocks of one model."""

    def __init__(self) -> None:
        self._failures: list[str] = []
        self._eager = set[str]()

    def take_failures(self) -> list[str]:
        """Return the failures since the last call, a sentence for each class of block, and forget them."""
        taken, self._failures = self._failures, []
        return taken

    def forward(self, block: nn.Module, compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that calls `compiled`, or `eager` once compiling that class of block has failed."""
        name = type(block).__name__

        @functools.wraps(eager)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if name in self._eager:
                return eager(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - foreign code: a compiler fails with whatever it likes
                result = eager(*args, **kwargs)  # raises if the block itself is wrong
                self._fail(name, error)
                return result

        return forward

    def _fail(self, name: str, error: Exception) -> None:
        self._eager.add(name)
        inner = getattr(error, "inner_exception", error)  # what the backend raised
        lines = [line.strip() for line in str(inner).splitlines() if line.strip()] or [type(inner).__name__]
        cause = lines[0][:_LONGEST_CAUSE]
        logger.warning("a block does not compile and runs eagerly", extra={"block": name, "error": str(error)})
        self._failures.append(f"blocks of class {name} do not compile and run eagerly from here on: {cause}")


_of_model = WeakKeyDictionary[nn.Module, Compilation]()


def compile_blocks(model: nn.Module, config: CompileConfig | None, *, backend: Backend = "inductor") -> None:
    """Replace the forward of every block by one that compiles at its first call; do nothing without `config`.

    Call it after activation checkpointing and before sharding, so that FSDP's hooks are outside of the graphs.
    """
    if config is None:
        return
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, _MOST_GRAPHS)
    # Compile the backward together with the forward, where a failure can be handled, and not in autograd's backward.
    functorch_config.force_non_lazy_backward_lowering = True
    compilation = _of_model[model] = Compilation()
    backend = _waited_for(backend)
    for block in blocks_of(model):
        eager = block.forward
        compiled = torch.compile(eager, dynamic=True, fullgraph=config.fullgraph, backend=backend)
        block.__dict__["forward"] = compilation.forward(block, compiled, eager)


@functools.cache  # dynamo keeps graphs by backend: a new wrapper would compile all graphs again
def _waited_for(backend: Backend) -> Callable[..., Any]:
    """Return the backend wrapped so that each compilation is a registered wait; a first step may take minutes."""
    compile_graph = lookup_backend(backend)

    @functools.wraps(compile_graph)
    def compiled(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **kwargs: Any) -> Callable[..., Any]:
        with waits.waiting(f"a graph of {len(graph.graph.nodes)} operations to be compiled"):
            return compile_graph(graph, inputs, **kwargs)

    return compiled


def take_failures(model: nn.Module) -> list[str]:
    """Return a sentence for each class of block that failed to compile since the last call."""
    compilation = _of_model.get(model)
    return [] if compilation is None else compilation.take_failures()


def is_compiled(model: nn.Module) -> bool:
    """Return whether `compile_blocks` was called for the model, also if compiling failed."""
    return model in _of_model


def width_of(model: Any, width: int) -> int:
    """Return `width`, rounded up to a multiple of `WIDTH` if blocks are compiled and the model has enough positions."""
    if not is_compiled(model):
        return width
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or width
    return max(min(-(-width // WIDTH) * WIDTH, most), width)
