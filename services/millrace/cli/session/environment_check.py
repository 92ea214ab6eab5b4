"""`--check-environments`: load the environments of a config before the run is submitted, on the machine that will play
them.
"""

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.connection import open_client
from millrace.cli.session.prepare import Prepared
from millrace.cli.view.view import is_fancy
from millrace.config.sections.environments import EvalEnvConfig, NamedEnv, selection_json
from millrace.errors import InvalidSpecError, Violation

if TYPE_CHECKING:
    from millrace.env_server.trial import LoadedTrial


async def check_environments(prepared: Prepared, *, server: str | None) -> None:
    """Load the environments on the env-servers of `server`, or on this machine if that is None.

    Raises the error of the first environment that cannot be loaded; also if a key is not set.
    """
    with Steps() as steps:
        if server is None:
            await _check_here(prepared, steps)
            return
        steps.begin(f"loading the environments on the env-servers of {server}")
        async with open_client(server) as client:
            await client.runs.create(prepared.config.resolved_json(), validate_only=True, check_environments=True)
        steps.done("the environments can be loaded")


async def _check_here(prepared: Prepared, steps: "Steps") -> None:
    """Load the environments of a run in workers of this machine, and check that the variables with keys are set."""
    from millrace.env_server.isolation.inherited import teacher_key_problem

    keep_logs_off_the_terminal()
    settings = prepared.config.orchestrator
    variable = (settings.algo.teacher and settings.algo.teacher.api_key_var) or ""
    if problem := teacher_key_problem(variable):
        field = "orchestrator.algo.teacher.api_key_var"
        raise InvalidSpecError([Violation(field=field, value=variable, message=problem)], reason="TEACHER_KEY_MISSING")
    evaluated = [] if settings.eval is None else settings.eval.env
    trained = {env.name: settings.takes_several_traces(env) for env in settings.env}
    await _load([*settings.env, *evaluated], trained, settings.selections(), steps, demo_key=settings.demo_key)


async def check_evaluated(envs: Sequence[EvalEnvConfig]) -> None:
    """Load environments that this machine evaluates. Raises the error of the first that cannot be loaded."""
    with Steps() as steps:
        await _load(envs, {}, {env.name: selection_json(evaluated=env.select) for env in envs}, steps)


async def _load(
    envs: Sequence[NamedEnv],
    trained: Mapping[str, bool],
    selected: Mapping[str, str],
    steps: "Steps",
    *,
    demo_key: str = "",
) -> None:
    """Load environments, each name once, and report each to `steps`; raise the error of the first that fails.

    `trained` has the training environments: whether several traces are taken of a rollout. `selected` has for every
    environment the selection of tasks as JSON. `demo_key` is a field that some training task must have, if not empty.
    Raises InvalidSpecError (JUDGE_KEY_MISSING) also if the variable with a judge's key is not set.
    """
    from millrace.env_server.isolation.inherited import api_key_problem
    from millrace.env_server.trial import opened
    from millrace.internal.v1.play_pb2 import EnvSpec

    known: set[str] = set()
    for env in envs:
        if env.name in known:
            continue
        known.add(env.name)
        spec = EnvSpec(
            name=env.name,
            id=env.id,
            args_json=json.dumps(env.args, sort_keys=True),
            takes_several_traces=trained.get(env.name, True),
            is_text_only=True,
            judge_max_concurrent=env.judge.max_concurrent,
            judge_timeout_s=env.judge.timeout_s,
            judge_key_var=env.judge.api_key_var or "",
            python=env.python or "",
            image=env.image or "",
            select_json=selected[env.name],
            agent_json=env.agent.to_wire(),
            demo_key=demo_key if env.name in trained else "",
        )
        if problem := api_key_problem(spec.judge_key_var):
            wrong = Violation(field=f"judge.api_key_var of {env.name}", value=spec.judge_key_var, message=problem)
            raise InvalidSpecError([wrong], reason="JUDGE_KEY_MISSING")
        async with opened(spec, lambda name=env.name: steps.begin(f"loading environment {name}")) as trial:
            steps.done(loaded_line(trial))


def require_installed(envs: Sequence[NamedEnv], key: str) -> None:
    """Raise InvalidSpecError if this machine cannot play the environments `envs` of a stack that is started here.

    The reason is ENV_NOT_FOUND if an environment is missing, and ENV_PYTHON_REFUSED if the stack could not use the
    interpreter that an environment names. `key` is the config key of the list `envs`. Nothing is loaded. An environment
    in a container image is not looked for. Nothing is checked if the env-server is not installed here.
    """
    try:
        from millrace.env_server.interpreters import own_pythons, problem_of, why_missing
    except ModuleNotFoundError:  # the client alone is installed
        return
    allowed = own_pythons(os.environ)
    refused = [
        Violation(field=f"{key}[{index}].python", value=env.python, message=problem)
        for index, env in enumerate(envs)
        if not env.image and (problem := problem_of(env.python or "", allowed))
    ]
    if refused:
        raise InvalidSpecError(refused, reason="ENV_PYTHON_REFUSED")
    missing = [
        Violation(field=f"{key}[{index}].id", value=env.id, message=why)
        for index, env in enumerate(envs)
        if not env.image and (why := why_missing(env.id, env.python or "", allowed, directory=Path.cwd()))
    ]
    if missing:
        remedy = "correct the id or install the environment; of a run for another machine name its --server"
        raise InvalidSpecError(missing, reason="ENV_NOT_FOUND", remedy=remedy)


def keep_logs_off_the_terminal() -> None:
    """Keep logs of the pool and its workers off the terminal, except warnings of the workers.

    An error ends the command with its own message.
    """
    os.environ.setdefault("MILLRACE_LOG_LEVEL", "WARNING")  # of the workers, whose output is this terminal
    logging.getLogger("millrace").addHandler(logging.NullHandler())


def loaded_line(trial: "LoadedTrial") -> str:
    """Return a line about a loaded environment: time, API, number of tasks."""
    sizes = f"{len(trial.loaded.train)} training tasks, {len(trial.loaded.eval)} held-out tasks"
    where = trial.played_in and f"; {trial.played_in}"
    return f"loaded in {trial.load_s:.1f} s: API {trial.loaded.api}, {sizes}{where}"


class Steps:
    """Shows the current operation: as a spinner on a terminal, elsewhere as plain lines."""

    def __init__(self) -> None:
        self._is_live = is_fancy(sys.stderr, plain=False)
        self._status: Any = None

    def __enter__(self) -> "Steps":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def begin(self, text: str) -> None:
        """Show that an operation has begun."""
        if not self._is_live:
            click.echo(f"{text} ...", err=True)
            return
        from rich.console import Console

        self._status = Console(stderr=True).status(text)
        self._status.start()

    def done(self, text: str) -> None:
        """Show that the operation has succeeded."""
        self._stop()
        click.echo(text, err=True)

    def _stop(self) -> None:
        """End the spinner, if there is one."""
        if self._status is not None:
            self._status.stop()
            self._status = None
