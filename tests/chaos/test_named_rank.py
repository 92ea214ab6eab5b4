"""A rank of a gang that is stopped is named by `millrace run why`, as a user asks it, in a whole stack."""

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import psutil
import pytest

from millrace.local.stack import SERVICES, LocalStack, StackOptions
from millrace_testing.trainer.four_ranks import RANKS
from millrace_testing.workplaces import EXAMPLES, Workplace

pytestmark = [pytest.mark.long, pytest.mark.timeout(560)]

MODEL = "outputs/reverse-text/base"
NAMED_WITHIN_S = 30.0
BEGINS_WITHIN_S = 240.0
NAME = "stuck"


@dataclass(frozen=True)
class Place:
    """Where the commands are given, and the stack that they ask."""

    work: Workplace
    stack: LocalStack

    async def millrace(self, *argv: str) -> str:
        """Return what a command prints."""
        return await asyncio.to_thread(self.work.millrace, *argv, "--server", self.stack.address)

    async def why(self) -> str:
        """Return what `millrace run why` prints."""
        return await self.millrace("run", "why", NAME)

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the processes of the gang, by rank."""
        torchrun = psutil.Process(self.stack.supervisor.children["trainer"].pid)
        return {int(child.environ()["RANK"]): child for child in torchrun.children()}


@pytest.fixture
async def place(make_workplace, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    """Yield a run that has taken its first step with four ranks."""
    work: Workplace = make_workplace("named-rank")
    await asyncio.to_thread(work.run, str(EXAMPLES / "make_model.py"))
    options = StackOptions(directory=work.path / "outputs" / "stack", has_liveness=False)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    modules = {**SERVICES, "trainer": "millrace_testing.trainer.four_ranks"}
    monkeypatch.chdir(work.path)
    async with LocalStack(options, environ=environ, modules=modules) as stack:
        await stack.start()
        place = Place(work, stack)
        sizes = ["--orchestrator.batch-size", "16", "--orchestrator.rollouts-per-example", "4", "--max-steps", "1000"]
        run = ["@", Workplace.rl_toml, "--model.name", MODEL, "--name", NAME, *sizes, "--no-orchestrator.eval"]
        await place.millrace("run", "submit", *run)
        ends = time.monotonic() + BEGINS_WITHIN_S
        while not re.search(r"^step +[1-9]", await place.millrace("run", "show", NAME), re.MULTILINE):
            assert time.monotonic() < ends, await place.why()
        yield place


async def test_run_why_names_the_rank_that_is_stopped(place: Place) -> None:
    ranks = place.ranks()
    assert sorted(ranks) == list(range(RANKS))
    assert not re.search(r"rank \d", await place.why()), "nobody is named while all work"
    os.kill(ranks[2].pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        named = f"rank 2 of {RANKS} (process {ranks[2].pid} on "
        while named not in (said := await place.why()):
            assert time.monotonic() - began < NAMED_WITHIN_S, said
        assert time.monotonic() - began < NAMED_WITHIN_S
        lines = [line for line in said.splitlines() if named in line]  # the wait, and perhaps the chain
        assert all("which does not show itself" in line for line in lines), said
        others = [rank for rank in range(RANKS) if rank != 2]
        assert not any(f"rank {rank} of {RANKS}" in said for rank in others), said
    finally:
        os.kill(ranks[2].pid, signal.SIGCONT)
    ends = time.monotonic() + NAMED_WITHIN_S
    while named in (said := await place.why()):
        assert time.monotonic() < ends, said
