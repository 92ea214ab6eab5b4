"""What vLLM does while it starts, read from its output: minutes of weights, compilation and CUDA graphs."""

import re

_STAGES = (
    (re.compile(r"Loading \S* ?checkpoint shards: .*?(\d+)/(\d+)"), "loading weights, {} of {} files"),
    (re.compile(r"[Cc]apturing CUDA graphs?.*?\b(\d+)/(\d+)"), "capturing CUDA graphs, {} of {}"),
    (re.compile(r"Starting to load model|Loading weights|Loading model weights"), "loading weights"),
    (re.compile(r"torch\.compile|Dynamo bytecode|[Cc]ompiling a graph|Compiling .* kernels"), "compiling"),
    (re.compile(r"[Cc]apturing CUDA graph"), "capturing CUDA graphs"),
    (re.compile(r"KV cache|[Mm]emory profiling"), "measuring memory for the KV cache"),
)


def stage_of(line: str) -> str:
    """What a line says that is done, in words; empty if it says nothing of it. The last state of a bar counts."""
    shown = line.rstrip("\r").rpartition("\r")[2]
    for pattern, words in _STAGES:
        if match := pattern.search(shown):
            return words.format(*match.groups())
    return ""
