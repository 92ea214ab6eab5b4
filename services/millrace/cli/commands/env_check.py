"""`millrace env`: try an environment before a run needs it."""

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.errors import EXIT_FAILED, CliError

if TYPE_CHECKING:
    from millrace.cli.interrupts import Interrupts
    from millrace.env_server.trial import LoadedTrial, TrialModel, TrialTask
    from millrace.rollouts.types import Rollout

_SHOWN_CHARS = 4000
_ARGS_HINT = """write an object: --args '{"num_examples": 8}'"""


@click.group()
def env() -> None:
    """Try environments on this machine."""


@env.command()
@click.argument("env_id", metavar="ID")
@click.option("--args", "args_json", metavar="JSON", default="{}", help="Its arguments, as orchestrator.env.args.")
@click.option("--arg", "pairs", metavar="KEY=VALUE", multiple=True, help="One of them, as JSON or text.")
@click.option("--python", metavar="PATH", default="", help="Interpreter of its own, as orchestrator.env.python.")
@click.option("--task", "index", type=click.IntRange(min=0), default=0, show_default=True, help="Index of the task.")
@click.option("--eval", "is_held_out", is_flag=True, help="Take a held-out task instead of a training task.")
@click.option("--reply", metavar="TEXT", help="What the stub model says, each time it is asked.")
@click.option("--base-url", metavar="URL", help="Ask this OpenAI-compatible endpoint instead of the stub model.")
@click.option("--model", "model_name", metavar="NAME", help="The endpoint's model.")
@click.option("--api-key-var", metavar="NAME", help="Variable that holds the endpoint's key.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=120.0, show_default=True)
@click.option("--load-only", is_flag=True, help="Load it, and play nothing.")
@click.option("-o", "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def check(
    env_id: str, args_json: str, pairs: tuple[str, ...], *, python: str, load_only: bool, form: str, **choices: Any
) -> int:
    """Play one task of environment ID, and show prompt, completion, rewards and time.

    Needs no server and no model: a stub model answers, unless --base-url names another. The worker is confined, and
    inherits variables, as the env-server's workers are and do. Exits 0 if the rollout ended well, else 1.
    """
    from millrace.cli import interrupts
    from millrace.cli.session.environment_check import keep_logs_off_the_terminal
    from millrace.internal.v1.play_pb2 import EnvSpec

    keep_logs_off_the_terminal()
    spec = EnvSpec(
        name=env_id,
        id=env_id,
        args_json=json.dumps({**_object(args_json), **dict(map(_pair, pairs))}),
        takes_several_traces=True,
        python=python,
    )
    what = None if load_only else _task_and_model(choices)
    result = interrupts.run(lambda signals: _run(spec, what, signals))
    click.echo(json.dumps(result, indent=2, ensure_ascii=False) if form == "json" else "\n".join(_lines(result)))
    return 0 if result.get("status", "ok") == "ok" else EXIT_FAILED


def _object(text: str) -> dict[str, Any]:
    """Return the value of `--args`, a JSON object; raise CliError for anything else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CliError(f"--args is not JSON: {error}", hint=_ARGS_HINT) from None
    if not isinstance(value, dict):
        raise CliError("--args is not a JSON object", hint=_ARGS_HINT)
    return value


def _pair(text: str) -> tuple[str, Any]:
    """Return key and value of one `--arg KEY=VALUE`: the value is JSON, or text if it is no JSON.

    Raises CliError if there is no key or no `=`.
    """
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise CliError(f"--arg {text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _task_and_model(choices: dict[str, Any]) -> "tuple[TrialTask, TrialModel]":
    """Return the task to play and the model that answers, as the command's options `choices` name them.

    Raises CliError for an endpoint without a model's name.
    """
    from millrace.env_server.trial import TrialModel, TrialTask

    if choices["base_url"] and not choices["model_name"]:
        raise CliError("--base-url needs --model: the name of the endpoint's model")
    given = {"reply": choices["reply"], "base_url": choices["base_url"], "name": choices["model_name"]}
    given["api_key_var"] = choices["api_key_var"]
    model = TrialModel(**{name: value for name, value in given.items() if value is not None})
    task = TrialTask(index=choices["index"], is_held_out=choices["is_held_out"], timeout_s=choices["timeout_s"])
    return task, model


async def _run(spec: Any, what: "tuple[TrialTask, TrialModel] | None", signals: "Interrupts") -> dict[str, Any]:
    """Load the environment, play one task unless `what` is None, and return the result as plain data.

    `what` is the task and the model that answers. Each step is reported on standard error.
    """
    from millrace.cli.session.environment_check import Steps, loaded_line
    from millrace.env_server.trial import opened

    with Steps() as steps:
        async with opened(spec, lambda: steps.begin(f"loading environment {spec.id}")) as trial:
            result = _describe_env(trial)
            steps.done(loaded_line(trial))
            if what is not None:
                task, model = what
                steps.begin(f"playing task {task.index} with {model.base_url or 'the stub model'}")
                rollout = await trial.play(task, model)
                result |= _describe_rollout(rollout)
                steps.done(f"played in {rollout.seconds:.1f} s")
            return result


def _describe_env(trial: "LoadedTrial") -> dict[str, Any]:
    """Return what is known of a loaded environment, as plain data."""
    return {
        "env": trial.env.id,
        "api": trial.loaded.api,
        "python": trial.env.python or sys.executable,
        "num_train": len(trial.loaded.train),
        "num_eval": len(trial.loaded.eval),
        "compares_a_group": trial.loaded.requires_group,
        "load_seconds": round(trial.load_s, 3),
    }


def _describe_rollout(rollout: "Rollout") -> dict[str, Any]:
    """Return a played rollout as plain data: messages, reward, metrics, times, and the error if there is one."""
    error = rollout.error
    return {
        "task": rollout.task_index,
        "task_id": rollout.task_id,
        "status": rollout.status.value,
        "given": json.loads(rollout.task_json or "{}"),
        "messages": json.loads(rollout.messages_json or "[]"),
        "reward": rollout.reward,
        "metrics": dict(rollout.metrics),
        "num_turns": rollout.num_turns,
        "stop_condition": rollout.stop_condition,
        "seconds": round(rollout.seconds, 3),
        "model_seconds": round(rollout.model_seconds, 3),
        "error": error and {"type": error.type, "message": error.message, "frames": error.frames.splitlines()},
    }


def _lines(result: dict[str, Any]) -> list[str]:
    """Return the lines of the text format for a result of `_run`."""
    lines = [f"environment {result['env']} (API {result['api']}) can be loaded"]
    if "status" not in result:
        return lines
    for message in result["messages"]:
        lines += ["", f"{message.get('role', '?')}:", *_indented(_text(message.get("content")))]
    if given := result["given"]:
        lines += ["", "scored with:", *(f"  {name}: {_text(value)}" for name, value in given.items())]
    lines += ["", f"turns   {result['num_turns']}, stopped by {result['stop_condition'] or 'its end'}"]
    lines.append(f"time    {result['seconds']:.2f} s, of which the model {result['model_seconds']:.2f} s")
    if error := result["error"]:
        lines += [f"status  {result['status']}", f"error   {error['type']}: {error['message']}"]
        return [*lines, *(f"        {frame}" for frame in error["frames"])]
    lines.append(f"reward  {result['reward']:g}")
    return [*lines, *(f"        {name} = {value:g}" for name, value in sorted(result["metrics"].items()))]


def _text(content: Any) -> str:
    """Return the content of a message as text; content that is not a string is written as JSON.

    A text longer than `_SHOWN_CHARS` is cut there, and ends with how many characters are left out.
    """
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}… ({len(text) - _SHOWN_CHARS} characters more)"


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]
