"""An environment tried on its own, without an orchestrator or a run: loaded in a worker, and one task of it played.

The worker is confined as this machine's env-server would confine it, and inherits the same variables. So errors of a
run appear here: a missing package, a wrong argument, a key that is not set, a reward function that raises.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from millrace.env_server.interpreters import choose, own_pythons, require_allowed
from millrace.env_server.isolation.inherited import api_key_problem
from millrace.env_server.settings import EnvServerSettings, require_image
from millrace.env_server.workers.pool import EnvPool, PoolLimits
from millrace.env_server.workers.starter import WorkerStarter
from millrace.errors import InvalidSpecError, InvalidStateError, Violation
from millrace.internal.v1 import rollout_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, Sampling
from millrace.rollouts.requests import LoadedEnv, changed, has_train_task
from millrace.rollouts.types import Rollout

_POLL_S = 0.05


# A model that says the same thing every time: an OpenAI-compatible endpoint, to try an environment with.

NAME = "stub"
_LOOPBACK = "127.0.0.1"


@contextlib.asynccontextmanager
async def stub_model(reply: str) -> AsyncIterator[str]:
    """Serve a model on loopback that always answers `reply`, and yield its base URL, which ends with `/v1`."""

    async def chat(request: web.Request) -> web.StreamResponse:
        """Answer a chat request with `reply`, as a stream if the request asks for one."""
        body = await request.json()
        answer = _answer(reply, is_chunk=bool(body.get("stream")))
        if not body.get("stream"):
            return web.json_response(answer)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n".encode())
        return stream

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": NAME, "object": "model", "owned_by": "millrace"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, _LOOPBACK, 0).start()
        yield f"http://{_LOOPBACK}:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def _answer(reply: str, *, is_chunk: bool) -> dict[str, Any]:
    """Return a chat completion with the reply, or with `is_chunk` the only chunk of its stream."""
    message = {"role": "assistant", "content": reply}
    choice = {"index": 0, "delta" if is_chunk else "message": message, "finish_reason": "stop"}
    return {
        "id": "stub",
        "object": "chat.completion.chunk" if is_chunk else "chat.completion",
        "created": int(time.time()),
        "model": NAME,
        "choices": [choice],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialModel:
    """The model of a trial: an OpenAI-compatible endpoint, or without a URL a stub that always answers `reply`."""

    reply: str = "I do not know."
    base_url: str = ""
    name: str = NAME
    api_key_var: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTask:
    """The task that is played, and for how long."""

    index: int = 0
    is_held_out: bool = False
    timeout_s: float = 120.0
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTrial:
    """A loaded environment, and how long the loading took."""

    env: EnvSpec
    loaded: LoadedEnv
    load_s: float
    pool: EnvPool
    played_in: str = ""
    """The interpreter that was chosen for it, and why; "" for this process's own, or a named one."""

    async def play(self, task: TrialTask, model: TrialModel) -> Rollout:
        """Play one rollout of a task with the model, and return it, failed or not.

        Raises InvalidSpecError if the task does not exist or the variable for the model's key is not set.
        """
        async with contextlib.AsyncExitStack() as stack:
            base_url = model.base_url or await stack.enter_async_context(stub_model(model.reply))
            request = PlayGroupRequest(
                run_uid="trial",
                purpose=rollout_pb2.PURPOSE_EVAL,
                ordinal=0,
                members=[0],
                group_size=1,
                env=self.env,
                base_url=base_url,
                use_train_tasks=not task.is_held_out,
                task_index=task.index,
                model=model.name,
                sampling=task.sampling,
                rollout_timeout_seconds=task.timeout_s,
                is_external=True,
                api_key_var=model.api_key_var,
            )
            self._check(request)
            [rollout] = await self.pool.play(request, tokenizer_dir="")
            return rollout

    def _check(self, request: PlayGroupRequest) -> None:
        """Raise InvalidSpecError if the environment does not have the request's task, or a worker does not have the
        key.
        """
        wrong: list[Violation] = []
        num_tasks = len(self.loaded.tasks(request))
        if not 0 <= request.task_index < num_tasks:
            which = "training" if has_train_task(request) else "held-out"
            message = f"the environment has {num_tasks} {which} tasks"
            wrong.append(Violation(field="task", value=str(request.task_index), message=message))
        if problem := api_key_problem(request.api_key_var):
            wrong.append(Violation(field="api_key_var", value=request.api_key_var, message=problem))
        if wrong:
            raise InvalidSpecError(wrong, reason="REQUEST_INVALID")


@contextlib.asynccontextmanager
async def opened(env: EnvSpec, note_start: Callable[[], object] = lambda: None) -> AsyncIterator[LoadedTrial]:
    """Load an environment in a worker of its own and yield it; end the worker after the block.

    `note_start` is called when loading begins. Raises InvalidStateError if loading fails, and InvalidSpecError for an
    image or interpreter that is not allowed.
    """
    settings = EnvServerSettings.from_env(os.environ)
    require_image(env.image, settings.image)
    pythons = own_pythons(os.environ)
    require_allowed(env.python, pythons)
    why = ""
    if not env.python:
        choice = await asyncio.to_thread(choose, env.id, pythons)
        env, why = changed(env, python=choice.python), choice.why
    # A template would be started for a single fork.
    starter = WorkerStarter(settings.confinement(), forks=False)
    pool = EnvPool(env, PoolLimits(), starter)
    try:
        note_start()
        began = time.monotonic()
        pool.start()
        # unregistered wait: of a command, bounded by the pool's own limit for a load
        while pool.info is None and pool.failure is None:  # noqa: ASYNC110 - the pool has no event for it
            await asyncio.sleep(_POLL_S)
        if pool.failure is not None:
            raise InvalidStateError(
                f"environment {env.id!r} could not be loaded: {pool.failure.error_type}: {pool.failure}",
                reason="ENV_LOAD_FAILED",
                remedy=pool.failure.remedy or "correct what it names, then check it again",
            )
        assert pool.info is not None, "the loop above"
        yield LoadedTrial(env=env, loaded=pool.info, load_s=time.monotonic() - began, pool=pool, played_in=why)
    finally:
        await pool.close()
        await starter.close()
