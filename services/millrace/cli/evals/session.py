"""Play an evaluation on a local stack or on a server, from its submission to its results in `eval.json`."""

import asyncio
import contextlib
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from millrace.cli import interrupts
from millrace.cli.connection import open_client
from millrace.cli.errors import CliError, Interrupted
from millrace.cli.evals.policies import EvalPolicy, digests_of
from millrace.cli.evals.prepare import PreparedEval
from millrace.cli.interrupts import Interrupts
from millrace.cli.session.follow import follow, require_success
from millrace.cli.view.progress import Progress, write_eval_plot
from millrace.cli.view.text import duration
from millrace.cli.view.view import PlainView, is_fancy
from millrace.client import Client
from millrace.config import ClientConfig, EvalRunConfig
from millrace.config.sections.environments import have_conversations
from millrace.decoding import decode_object
from millrace.errors import AlreadyExistsError, MillraceError, NotFoundError
from millrace.inference.launch_env import engine_environ
from millrace.local.directory import free_ports
from millrace.local.stack import SERVICES, LocalStack, StackOptions
from millrace.runlog import names as run_name
from millrace.storage.clean_up import TEMPORARY, remove
from millrace.v1 import event_pb2, run_pb2

RESULTS_NAME = "eval.json"
BEGUN_NAME = "begun.json"
"""The file that a later `--resume` reads: the settings, the digests of the weights and environments, and the engine's
port.
"""
_MAY_DIFFER = {"client", "output_dir", "run", "log", "max_concurrent"}
"""Keys of the config that do not change the results.

`client` is among them, because it has the URL of the local engine.
"""
LOOK_S = 0.5
SAY_S = 5.0
"""Interval of the progress lines where no bar can be drawn."""


class OtherEvaluationError(CliError):
    """The evaluation to resume was begun with other settings, weights or environments."""


class EvalView(PlainView):
    """Prints plain lines of a run, and keeps the report of each environment."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        """Print the lines of the run that `progress` describes to `stream`."""
        super().__init__(stream, progress)
        self.reports: dict[str, event_pb2.EvalCompleted] = {}

    def show(self, event: event_pb2.Event) -> None:
        """Print the event's line, if the event has one."""
        super().show(event)
        if event.HasField("eval_completed"):
            self.reports[event.eval_completed.env] = event.eval_completed


async def evaluate_here(
    prepared: PreparedEval, interrupts: Interrupts, *, stream: TextIO | None = None
) -> tuple[dict[str, Any], Path]:
    """Start a local stack without a trainer, evaluate, and stop it.

    Return the results and the path they were written to. Messages go to `stream`, standard error by default. A resumed
    evaluation continues from the log in its directory.
    """
    begun, config = time.monotonic(), prepared.config
    directory = claim(prepared)
    if prepared.is_resumed and (data := finished(prepared)) is not None:
        return data, directory / RESULTS_NAME
    progress = Progress(name=f"runs/{prepared.name}", has_versions=False)
    view = EvalView(progress, stream or sys.stderr)
    options, modules, config = eval_stack(prepared, directory, http_port=begin(prepared, directory))
    try:
        async with LocalStack(options, note=view.note, modules=modules) as stack:
            interrupts.on_second(stack.supervisor.skip_grace.set)
            view.note(f"starting the local stack; process logs: {directory / 'logs'}")
            await stack.start()
            async with Client(stack.address, access=stack.access) as client:
                run = await stack.guard(_evaluate(client, config, prepared.name, progress, view, prepared=prepared))
    except asyncio.CancelledError:
        if not prepared.part_of:
            view.note(go_on(prepared))
        raise
    require_success(progress, logs=directory / "logs")
    _say_failures(view, directory / "logs" / "env-server.log")
    return _write(prepared, run, view, directory, seconds=time.monotonic() - begun)


def claim(prepared: PreparedEval) -> Path:
    """Return the directory of the results, which need not exist yet.

    Raises AlreadyExistsError if it has results and they are not resumed, CliError if there is nothing to resume.
    """
    directory = Path(prepared.config.output_dir) / prepared.name
    is_there = directory.is_dir() and any(directory.iterdir())
    if is_there and not prepared.is_resumed:
        raise AlreadyExistsError(
            f"{directory} exists already",
            reason="EVAL_EXISTS",
            remedy="go on with it: the same command with --resume; or choose another --name",
        )
    if prepared.is_resumed and not prepared.part_of and not is_there:
        raise CliError(f"there is no evaluation {prepared.name}: {directory} is not there", hint="leave --resume out")
    return directory


def go_on(prepared: PreparedEval) -> str:
    """Return a message that explains how to resume the evaluation."""
    return f"interrupted; to go on, give the same command with --name {prepared.name} --resume"


def finished(prepared: PreparedEval) -> dict[str, Any] | None:
    """Return the results that an earlier command of this name wrote; None if there are none.

    Raises OtherEvaluationError if its settings were different.
    """
    directory = Path(prepared.config.output_dir) / prepared.name
    _require_same(prepared, directory)
    path = directory / RESULTS_NAME
    return _read(path) if path.is_file() else None


def begin(prepared: PreparedEval, directory: Path) -> int:
    """Write the file for a later `--resume`, and return the engine's port.

    A resumed evaluation uses the port of the first attempt. Raises OtherEvaluationError if the earlier settings were
    different.
    """
    _require_same(prepared, directory)
    path = directory / BEGUN_NAME
    if path.is_file():
        return int(_read(path)["http_port"])
    (port,) = free_ports(1)
    directory.mkdir(parents=True, exist_ok=True)
    digests = digests_of(prepared.config, weights=prepared.weights)
    _replace_json(path, {"http_port": port, "settings": _settings(prepared.config), "digests": digests})
    return port


def _require_same(prepared: PreparedEval, directory: Path) -> None:
    """Raise OtherEvaluationError if the evaluation begun in `directory` had other settings, weights or environments."""
    path = directory / BEGUN_NAME
    if not path.is_file():
        return
    begun = _read(path)
    before, now = begun["settings"], _settings(prepared.config)
    if prepared.part_of:
        # The weights of one policy of several are where they were put this time; their digest is compared below.
        before, now = {**before, "model": None}, {**now, "model": None}
    if differ := sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)):
        raise OtherEvaluationError(
            f"{directory} is an evaluation with other settings: {', '.join(differ)}",
            hint="give the command as it was, or choose another --name",
        )
    if not isinstance(digests := begun.get("digests"), dict):
        return  # of the whole of several policies, or of an earlier release
    found = digests_of(prepared.config, weights=prepared.weights)
    if differ := sorted(what for what in digests.keys() | found.keys() if digests.get(what) != found.get(what)):
        raise OtherEvaluationError(
            f"{directory} was begun with another {', another '.join(differ)}: the files there have changed since",
            hint="choose another --name to evaluate what is there now, or put back what was there",
        )


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON file of an earlier command. Raises CorruptObjectError if it is not complete."""
    remedy = f"choose another --name, or remove {path.parent}"
    return decode_object(path.read_bytes(), what=str(path), reason="EVAL_RESULTS_CORRUPT", remedy=remedy)


def _settings(config: EvalRunConfig) -> dict[str, Any]:
    """Return the keys of the config that influence the results."""
    return {key: value for key, value in json.loads(config.resolved_json()).items() if key not in _MAY_DIFFER}


def _say_failures(view: EvalView, log: Path) -> None:
    """Print how many rollouts of each environment failed, and the log with their errors."""
    failed = {name: report.num_failed for name, report in view.reports.items() if report.num_failed}
    for name, number in failed.items():
        report = view.reports[name]
        tasks = ", ".join(report.failed_tasks)
        view.note(
            f"{name}: {number} of {number + report.num_rollouts} rollouts failed (tasks {tasks}), and count as "
            f"reward 0 and as not passed; their errors: {log}"
        )


async def evaluate_there(prepared: PreparedEval, interrupts: Interrupts) -> tuple[dict[str, Any], Path]:
    """Submit the evaluation to the server and follow it; return the results and the path they were written to.

    Ctrl-C detaches, and the run continues.
    """
    begun = time.monotonic()
    progress = Progress(name=f"runs/{prepared.name}", has_versions=False)
    view = EvalView(progress, sys.stderr)
    async with open_client(prepared.server or "") as client:
        try:
            run = await _evaluate(client, prepared.config, prepared.name, progress, view, prepared=prepared)
        except asyncio.CancelledError:
            view.note(f"detached; the run continues.   stop: millrace run cancel {prepared.name}")
            raise
    require_success(progress)
    directory = Path(prepared.config.output_dir) / prepared.name
    return _write(prepared, run, view, directory, seconds=time.monotonic() - begun)


def eval_stack(
    prepared: PreparedEval, directory: Path, *, http_port: int
) -> tuple[StackOptions, dict[str, str], EvalRunConfig]:
    """Return the options of the local stack, its services, and the config with the address of its engine.

    There is no trainer; there is an engine unless the config has an endpoint. The stack listens on loopback and has no
    tokens or certificates, because the env-server calls the engine like any endpoint (`[client]`), and endpoints never
    get a deployment token.
    """
    config = prepared.config
    names = {"orchestrator", "env-server"} | ({"inference"} if config.client is None else set())
    engine: dict[str, str] = {}
    if config.client is None:
        seats = config.max_concurrent
        if "max_num_seqs" in prepared.inference.model_fields_set:
            seats = prepared.inference.max_num_seqs
        engine = engine_environ(prepared.inference.model_copy(update={"max_num_seqs": seats})) | {
            "MILLRACE_MODEL": str(Path(config.model.name).expanduser().resolve()),
            "MILLRACE_MODEL_NAME": config.model.name,
            "MILLRACE_NEEDS_CHAT_TEMPLATE": str(int(have_conversations(config.env))),
        }
        config = config.model_copy(update={"client": ClientConfig(base_url=[f"http://127.0.0.1:{http_port}/v1"])})
    options = StackOptions(
        directory=directory,
        redis_url=prepared.settings.redis_url,
        redis_url_file=prepared.settings.redis_url_file,
        store_url=prepared.settings.store_url,
        prefix=prepared.settings.prefix,
        http_port=http_port,
        engine=prepared.inference.engine,
        gpus=prepared.gpus,
        engine_environ=engine,
        log_level=config.log.level,
        log_json=config.log.json_logging,
    )
    return options, {name: module for name, module in SERVICES.items() if name in names}, config


async def _evaluate(
    client: Client, config: EvalRunConfig, run_id: str, progress: Progress, view: EvalView, *, prepared: PreparedEval
) -> run_pb2.Run:
    """Create the run of the evaluation, or find the one that is resumed, and follow it to its end; return the run.

    `run_id` is its name. `progress` and `view` get its events.
    """
    run = await _find(client, run_id) if prepared.is_resumed and prepared.server is None else None
    is_new = run is None
    if run is None:
        run = await client.runs.create(
            config.resolved_json(), run_id=run_id, kind=run_pb2.RUN_KIND_EVAL, request_id=str(uuid.uuid4())
        )
    progress.name, progress.uid = run.name, run.uid
    view.note(f"{'submitted' if is_new else 'going on with'} {run.name} (uid {run.uid})")
    async with _shown_progress(client, run.name, view, is_plain=prepared.is_plain):
        await follow(client, progress, view)
    return run


async def _find(client: Client, run_id: str) -> run_pb2.Run | None:
    """Return the run that an earlier stack in this directory created; None if there is none."""
    try:
        return await client.runs.get(run_id)
    except NotFoundError:
        return None


@contextlib.asynccontextmanager
async def _shown_progress(client: Client, name: str, view: EvalView, *, is_plain: bool) -> AsyncIterator[None]:
    """Show the progress of the run during the block: a bar on a terminal, otherwise a line every few seconds."""
    tell = _draw if is_fancy(sys.stderr, plain=is_plain) else _say
    teller = asyncio.create_task(tell(client, name, view), name="progress of the evaluation")
    try:
        yield
    finally:
        teller.cancel()
        await asyncio.gather(teller, return_exceptions=True)


async def _draw(client: Client, name: str, view: EvalView) -> None:
    """Show a bar with rollouts and mean reward on the terminal, until cancelled."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("reward {task.fields[reward]}"), TimeRemainingColumn())
    with Bars(*columns, transient=True) as bars:
        bar = bars.add_task("", total=None, reward="–")
        async for now in _progress_of(client, name, LOOK_S):
            bars.update(bar, total=now.max_steps, completed=now.step, reward=f"{now.reward:.3f}")


async def _say(client: Client, name: str, view: EvalView) -> None:
    """Print a line with rollouts and mean reward every few seconds if there is news, until cancelled."""
    last = -1
    async for now in _progress_of(client, name, SAY_S):
        if now.step != last:
            last = now.step
            view.note(f"played {now.step}/{now.max_steps} rollouts  reward {now.reward:.3f}")


async def _progress_of(client: Client, name: str, period_s: float) -> AsyncIterator[run_pb2.RunProgress]:
    """Yield the progress of the run once per period.

    A failed query is skipped; the task that follows the events reports the error.
    """
    while True:
        await asyncio.sleep(period_s)
        with contextlib.suppress(MillraceError):
            progress = (await client.runs.get(name)).progress
            if progress.max_steps:
                yield progress


def _write(
    prepared: PreparedEval, run: run_pb2.Run, view: EvalView, directory: Path, *, seconds: float
) -> tuple[dict[str, Any], Path]:
    """Write the results into the directory; return them and the path.

    `seconds` is how long the evaluation took.
    """
    order = [env.name for env in prepared.config.env]
    reports = [view.reports[name] for name in order if name in view.reports]
    data = results(prepared, run, reports, seconds=seconds)
    path = directory / RESULTS_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace_json(path, data)
    return data, path


def _replace_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write `data` as JSON to `path`, in place of the file that may be there. A kill leaves the old file or the new."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(json.dumps(data, indent=2) + "\n")
    fresh.replace(path)


# Several policies evaluated one after the other: each in a run of its own, all in one table and one plot.

PLOT_NAME = "eval.png"
_WEIGHTS = "policies"
"""Subdirectory of the results for downloaded and merged weights, removed after each evaluation."""


def evaluate_policies(prepared: PreparedEval) -> tuple[dict[str, Any], Path]:
    """Evaluate all policies one after the other; return the results and their path.

    The results are written after each policy. Raises AlreadyExistsError if the whole or a part exists already and is
    not resumed.
    """
    parts = [_part(prepared, policy) for policy in prepared.policies]
    directory, *_ = [claim(each) for each in (prepared, *parts)]
    path = directory / RESULTS_NAME
    directory.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {"name": prepared.name, "policies": []}
    # A directory with results in it is one that `--resume` goes on with, also before the first policy is evaluated.
    _replace_json(path, data)
    try:
        for policy, part in zip(prepared.policies, parts, strict=True):
            found = _sweep_evaluate(part, policy, directory)
            data["policies"].append({"policy": policy.label, "step": policy.step, **found})
            _replace_json(path, data)
    except (Interrupted, KeyboardInterrupt):
        print(go_on(prepared), file=sys.stderr)
        raise
    write_eval_plot(data, directory / PLOT_NAME)
    return data, path


def _part(prepared: PreparedEval, policy: EvalPolicy) -> PreparedEval:
    """Return the evaluation of one policy of several, with a name made of the whole's and the policy's."""
    name = run_name.make(prepared.name, policy.label)
    return replace(prepared, name=name, policies=(), part_of=prepared.name)


def _sweep_evaluate(one: PreparedEval, policy: EvalPolicy, directory: Path) -> dict[str, Any]:
    """Evaluate one policy of several on a local stack, and return the results.

    An earlier attempt that has finished is not repeated: its results are returned. The policy's weights are downloaded
    below `directory`, and removed afterwards.
    """
    place = directory / _WEIGHTS / policy.label
    one = replace(one, weights=policy.digest())
    if one.is_resumed and (data := finished(one)) is not None:
        print(f"{policy.label}: evaluated before", file=sys.stderr)
        return data
    remove(place, what=TEMPORARY)  # a download that was interrupted
    print(f"{policy.label}: runs/{one.name}", file=sys.stderr)
    one = replace(one, config=one.config.with_model(str(policy.fetch(place))))
    data, _ = interrupts.run(lambda signals: evaluate_here(one, signals))
    remove(place, what=TEMPORARY)
    return data


# What an evaluation came to: `eval.json` for programs, a table for people.

_OWN = ("reward/sem", "truncated", "turns", "seconds", "endpoint_retries")


def results(
    prepared: PreparedEval, run: run_pb2.Run, reports: Sequence[event_pb2.EvalCompleted], *, seconds: float
) -> dict[str, Any]:
    """Return the results of one evaluation as plain data, with its environments in the order of `reports`.

    `run` is the evaluation's run, `seconds` how long it took.
    """
    config = prepared.config
    return {
        "name": run.name,
        "uid": run.uid,
        "model": config.model.name,
        "endpoints": [] if config.client is None else list(config.client.base_url),
        "rollouts_per_example": config.rollouts_per_example,
        "pass_threshold": config.pass_threshold,
        "seconds": round(seconds, 3),
        "envs": {report.env: _env(report) for report in reports},
    }


def _env(report: event_pb2.EvalCompleted) -> dict[str, Any]:
    """Return the results of one environment as plain data, from the report in its event."""
    metrics = dict(sorted(report.metrics.items()))
    chances = {name: value for name, value in metrics.items() if name.startswith(("pass@", "pass^"))}
    passes: dict[str, Any] = {name: value for name, value in chances.items() if "/" not in name}
    passes |= {
        f"{name}/ci95": [chances[f"{name}/low"], chances[f"{name}/high"]]
        for name in passes
        if f"{name}/low" in chances and f"{name}/high" in chances
    }
    return {
        "reward_mean": report.reward_mean,
        "reward_sem": metrics.get("reward/sem"),
        **passes,
        "num_rollouts": report.num_rollouts,
        "num_failed": report.num_failed,
        "failed_tasks": list(report.failed_tasks),
        "endpoint_retries_mean": metrics.get("endpoint_retries"),
        "truncated": metrics.get("truncated"),
        "turns_mean": metrics.get("turns"),
        "rollout_seconds_mean": metrics.get("seconds"),
        "seconds": report.seconds,
        "metrics": {name: value for name, value in metrics.items() if name not in chances and name not in _OWN},
    }


def figures(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of each environment under the metric names that evaluations during a run use.

    `data` are the results of one evaluation; numbers that it does not have are left out.
    """
    values: dict[str, Any] = {}
    for env, found in data["envs"].items():
        prefix = f"eval/{env}"
        values |= {
            f"{prefix}/reward/mean": found["reward_mean"],
            **{f"{prefix}/{name}": found[name] for name in ("num_rollouts", "num_failed", "seconds")},
            **{f"{prefix}/{name}": value for name, value in found.items() if name.startswith(("pass@", "pass^"))},
            **{f"{prefix}/metrics/{name}": value for name, value in found["metrics"].items()},
            f"{prefix}/metrics/reward/sem": found["reward_sem"],
            f"{prefix}/metrics/truncated": found["truncated"],
            f"{prefix}/metrics/turns": found["turns_mean"],
        }
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def table(data: dict[str, Any]) -> list[str]:
    """Return a table with one line per policy and environment: reward ± standard error, pass@k with its interval,
    rollouts. Each line is over all rollouts; a failed one counts as reward 0 and as not passed.
    """
    policies: list[dict[str, Any]] = data.get("policies") or [data]
    lines = [(each.get("policy", ""), name, env) for each in policies for name, env in each["envs"].items()]
    ks = list(dict.fromkeys(k for *_, env in lines for k in env if k.startswith("pass@") and "/" not in k))
    rows = [["policy", "environment", "reward", *ks, "rollouts", "failed", "time"]]
    for policy, name, env in lines:
        sem = "" if env["reward_sem"] is None else f" ± {env['reward_sem']:.3f}"
        total = env["num_rollouts"] + env["num_failed"]
        counts = [str(total), str(env["num_failed"]), duration(env["seconds"])]
        rows.append([policy, name, f"{env['reward_mean']:.3f}{sem}", *(_chance(env, k) for k in ks), *counts])
    if "policies" not in data:
        rows = [row[1:] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _chance(env: dict[str, Any], k: str) -> str:
    """Return pass@k of an environment as text, with its confidence interval; a dash if it was not computed."""
    if k not in env:
        return "–"
    interval = env.get(f"{k}/ci95")
    return f"{env[k]:.3f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")
