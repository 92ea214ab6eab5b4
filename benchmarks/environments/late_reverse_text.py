"""The demo's environment with a reward that takes a while, as that of a remote judge would. For benchmarks only."""

import asyncio
from typing import Any

import verifiers as vf
from reverse_text import load_environment as load_reverse_text
from reverse_text import reverse_similarity


def load_environment(latency_s: float = 0.5, **args: Any) -> vf.Environment:
    """The environment of `reverse_text.load_environment(**args)`, each of whose rewards waits `latency_s`."""

    async def late_similarity(completion: list[Any], answer: str) -> float:
        await asyncio.sleep(latency_s)
        return reverse_similarity(completion, answer)

    env = load_reverse_text(**args)
    env.rubric = vf.Rubric(funcs=[late_similarity])
    return env
