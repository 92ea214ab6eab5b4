"""Keeps a started stack alive: starts again what died, and kills what no longer answers so that it dies.

    keeper = Keeper(supervisor, probes, ...)
    await keeper.run()          # returns never; ProcessDiedError when a process is in a crash loop

It begins when every process was ready once: a death before is an error of the start, which starting again would hide.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from millrace.errors import first_error
from millrace.local import liveness
from millrace.local.liveness import Answer, AnswerHistory, LivenessAction, Probe
from millrace.local.restarts import SETTLED_AFTER_S, ExitKind, Lives
from millrace.local.rotation import keep_bounded
from millrace.processes.supervisor import Child, Supervisor, describe_death
from millrace.processes.table import is_stopped
from millrace.telemetry import waits

_READY_POLL_S = 0.1
_TELL_READY_AFTER_S = 1.0


class Keeper:
    """What keeps the processes of one supervisor alive."""

    def __init__(
        self,
        supervisor: Supervisor,
        probes: Mapping[str, Probe],
        *,
        note: Callable[[str], None],
        on_change: Callable[[], None],
        ready_deadline_s: float,
        is_restarting: bool = True,
        has_liveness: bool = True,
        settled_after_s: Mapping[str, float] | None = None,
    ) -> None:
        """`probes` by the names of the children, which all serve now.

        `settled_after_s`, by name, is for those that need longer than others to show that a life is a good one.

        `note` is told in words what happens, `on_change` that the pids are others. A process that was started again and
        does not serve within `ready_deadline_s` is killed, which counts as a death.
        """
        self._supervisor = supervisor
        self.probes = probes
        self._note = note
        self._on_change = on_change
        self._ready_deadline_s = ready_deadline_s
        self._has_liveness = has_liveness
        settled = settled_after_s or {}
        self.lives = {name: Lives(settled_after_s=settled.get(name, SETTLED_AFTER_S)) for name in probes}
        self._is_restarting = is_restarting
        self._heard_at: dict[str, float] = {}
        self.logs: Path | None = None
        """A directory whose logs are kept bounded meanwhile."""

    def restarts(self) -> dict[str, int]:
        """How often each process was started again."""
        return {name: lives.restarts for name, lives in self.lives.items()}

    async def run(self) -> NoReturn:
        """Keep them alive until cancelled; ProcessDiedError names the one that cannot be."""
        now = time.monotonic()
        for lives in self.lives.values():
            lives.ready(now)
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._has_liveness:
                    for name in self.probes:
                        tasks.create_task(self._check(name), name=f"liveness of {name}")
                if self.logs is not None:
                    tasks.create_task(keep_bounded(self.logs, note=self._note), name="rotation of logs")
                while True:
                    child = await self._supervisor.next_death()
                    tasks.create_task(self._revive(child), name=f"restart of {child.spec.name}")
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    async def _revive(self, child: Child) -> None:
        """Start a dead process again and wait until it serves; ProcessDiedError for one in a crash loop."""
        name, lives = child.spec.name, self.lives[child.spec.name]
        exit_kind = ExitKind.of(await child.exited)
        decision = lives.end(time.monotonic(), exit_kind)
        given_up = decision.short_lives if self._is_restarting else None
        error = await asyncio.to_thread(describe_death, child, given_up_after=given_up)
        await self._supervisor.end_rest(child)
        if decision.is_hopeless or not self._is_restarting:
            self._note(f"{name} died: {error.how}; it is not started again")
            raise error
        await asyncio.sleep(decision.delay_s)
        lives.begin()
        again = await self._supervisor.start(child.spec)
        self._on_change()
        ended = "ended" if exit_kind is ExitKind.ORDERLY else "died"
        self._note(f"{name} {ended}: {error.how}; started again (restart {lives.restarts})")
        await self._until_ready(name, again)

    async def _until_ready(self, name: str, child: Child) -> None:
        """Return when it serves or has died again; one that does neither in time is killed."""
        began = time.monotonic()
        ends = began + self._ready_deadline_s
        with waits.waiting(f"{name} to be ready again", waits_on=name, deadline_s=self._ready_deadline_s):
            while child.is_alive and time.monotonic() < ends:
                if await self.probes[name]() is Answer.SERVING and child.is_alive:
                    now = time.monotonic()
                    self.lives[name].ready(now)
                    if now - began > _TELL_READY_AFTER_S or name == "redis":  # everybody waits for Redis
                        self._note(f"{name} is ready again after {now - began:.1f} s")
                    return
                await asyncio.sleep(_READY_POLL_S)
        if child.is_alive:
            self._note(f"{name} is not ready {self._ready_deadline_s:.0f} s after its start: killing it")
            await self._supervisor.end_rest(child)

    async def _check(self, name: str) -> None:
        """Ask one process for its health as long as the stack lives; kills each life of it that stops answering."""
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            await asyncio.sleep(liveness.PERIOD_S)
            child = self._supervisor.children[name]
            if self._is_serving(child):  # else it is between two lives: nothing is expected of it
                await self._check_life(child)

    async def _check_life(self, child: Child) -> None:
        """Ask until this life ends."""
        name, history = child.spec.name, AnswerHistory(time.monotonic())
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while self._is_serving(child):
            answer = await self.probes[name]()
            now = time.monotonic()
            if answer is not Answer.SILENT:
                self._heard_at[name] = now
            is_certain = answer is Answer.SICK or is_stopped(child.pid) or self._others_answer(name, now)
            action = history.hear(answer, now, is_certain=is_certain)
            said = f"{name} {_what(answer)} for {history.silent_s(now):.0f} s{_why(child)}"
            if action is LivenessAction.NAME:
                self._note(said)
            elif action is LivenessAction.KILL and child.is_alive:
                self._note(f"{said}: killing it")
                await self._supervisor.end_rest(child)
                return
            await asyncio.sleep(liveness.PERIOD_S)

    def _is_serving(self, child: Child) -> bool:
        name = child.spec.name
        is_newest = child is self._supervisor.children[name]
        return is_newest and child.is_alive and self.lives[name].ready_at is not None

    def _others_answer(self, name: str, now: float) -> bool:
        recent = now - liveness.NAME_AFTER_S
        return any(at > recent for other, at in self._heard_at.items() if other != name)


def _what(answer: Answer) -> str:
    return "says that it is not healthy" if answer is Answer.SICK else "has not answered its health check"


def _why(child: Child) -> str:
    return " (it is stopped by a signal or a debugger)" if is_stopped(child.pid) else ""
