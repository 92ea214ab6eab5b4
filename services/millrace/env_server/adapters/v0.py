"""Adapter of `verifiers` v0 environments: modules with `load_environment()`.

Covers SingleTurnEnv, ToolEnv, MultiTurnEnv, StatefulToolEnv and environments with group rewards. Single rollouts go
through `run_rollout` one by one: in `run_group` one member that raises fails the whole group.

Tokens come from one of two routes; either way `samples.merge_turns` decides by comparing tokens what is one sample.

| route                    | when                                                        | who tokenizes              |
|--------------------------|-------------------------------------------------------------|----------------------------|
| `/inference/v1/generate` | several turns, and the policy's family has its own renderer | we: turns extend exactly   |
| `/v1/chat/completions`   | one turn, or no such renderer: nothing to be gained         | the engine, once per turn  |
| `/v1/completions`        | `message_type="completion"`: the policy goes on with text | the engine, once per turn  |

The environment's args choose between the first two: `renderer = "qwen3"` (or another name), or `renderer = "off"`.
Endpoints that are not ours are asked to chat, whatever the environment says: many serve nothing else.
"""

import asyncio
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import aiohttp
import verifiers as vf
from pydantic import BaseModel

from millrace.config.sections.sampling import NEUTRAL
from millrace.decoding import decode_json
from millrace.env_server.adapters import judges
from millrace.env_server.adapters.client_v0 import LeanClient, LeanCompletionsClient
from millrace.env_server.adapters.failures import (
    frames_of,
    is_engine_fault,
    not_text_error,
    other_part,
    refusal,
    refuse_other_parts,
)
from millrace.env_server.adapters.outcome import (
    NotANumberError,
    Outcome,
    checked,
    failed,
    failed_like,
    number_of,
    require_demonstrations,
)
from millrace.env_server.adapters.rubrics_v0 import (
    SCORED,
    Scored,
    completes_text,
    member_of,
    members_of,
    refuse_unknown_arguments,
    tasks_of,
    watch_rubrics,
)
from millrace.env_server.adapters.samples import SPANS, MissingTokensError, merge_turns
from millrace.env_server.adapters.samples_v0 import turns_of
from millrace.env_server.adapters.selection import NO_RENDERER, NO_TASKS, RENDERER, selected_tables, split_args
from millrace.env_server.agents.server import agent_server
from millrace.env_server.agents.sessions import AgentRules
from millrace.env_server.agents.v0 import apply_rules
from millrace.env_server.engine_access import ENGINE_LOST_MARK, engine_access
from millrace.env_server.library import releases
from millrace.env_server.library.endpoints import TOO_LONG, explain
from millrace.env_server.library.lookups import remember_lookups
from millrace.env_server.library.v0 import (
    HAS_RENDERERS,
    Client,
    ClientConfig,
    EnvExecutor,
    ErrorChain,
    note_columns,
    resolve_client,
)
from millrace.env_server.own_sampling import AskedSampling, OwnSamplingError, flat
from millrace.errors import CorruptObjectError, InvalidSpecError, Violation
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, Sampling
from millrace.rollouts.requests import LoadedEnv, has_train_task, request_parameters
from millrace.rollouts.types import RolloutStatus

_MODEL_ERRORS = frozenset({"ModelError", "InvalidModelResponseError", "EmptyModelResponseError", "EngineAuthError"})
# Engines inside the deployment take no key; the SDK of the renderer client insists on one.
_API_KEY_VARIABLE = "MILLRACE_ENGINE_API_KEY"
# The library hops to threads per turn; two cores' default of six threads would queue them.
_ENV_THREADS = 32
RETRIES_METRIC = "endpoint_retries"
"""Metric of rollouts of external endpoints: tries of model calls that were in vain."""
# As a column the error is the exception itself, and not what the library writes of it.
_STATE_COLUMNS = ["trajectory", "trajectory_id", "timed_out", "error"]


_NotTextError = not_text_error(vf.Error)


class V0Adapter:
    """A loaded v0 environment."""

    def __init__(self, env: vf.Environment, *, renderer: str, select_json: str = "") -> None:
        """Take a loaded environment, choose its tasks, and watch its rubrics.

        `renderer` is the one that the user configured, "off" for none, or "" to choose by the policy. `select_json` is
        `EnvSpec.select_json`. Replaces the library's scoring in this process; raises InvalidSpecError.
        """
        self._env = env
        self._renderer = renderer
        self._completes_text = completes_text(env, renderer="" if renderer == NO_RENDERER else renderer)
        self._session: aiohttp.ClientSession | None = None
        self._clients: dict[tuple[str, bool, str, str], Client] = {}
        watch_rubrics(vf.Rubric)
        remember_lookups()
        held_out, train = tasks_of(env, is_eval=True), tasks_of(env, is_eval=False)
        has_others = held_out is not None and held_out.size > 0
        self.train, self.eval = selected_tables(
            select_json, train=train or NO_TASKS, held_out=held_out if has_others else None, is_mixed=not has_others
        )
        # A group of environments does not say so itself.
        self.requires_group = any(member.requires_group_rollouts for member in members_of(env))
        self._declared = declared_by(env)
        declared = {"`sampling_args` of its constructor": self._declared} if self._declared else {}
        self.loaded = LoadedEnv(
            api="v0", requires_group=self.requires_group, train=self.train, eval=self.eval, declared=declared
        )

    @classmethod
    def load(cls, spec: EnvSpec, module: ModuleType, args: Mapping[str, Any]) -> Self:
        """Call the module's `load_environment` and return an adapter of the environment that it makes.

        `args` are the user's; those that are the env-server's own are not passed on. Installs the gate of judges in
        this process. Exceptions of the environment's code pass through; InvalidSpecError is raised if the environment
        cannot be played as the run config asks.
        """
        judges.JudgeGate(max_concurrent=spec.judge_max_concurrent, timeout_s=spec.judge_timeout_s).install()
        options = inspect.signature(module.load_environment).parameters
        own, ours = split_args(args, keys=(RENDERER,), options=options)
        renderer = str(ours.get(RENDERER) or "")
        if renderer not in ("", NO_RENDERER) and not HAS_RENDERERS:
            raise _no_renderers(renderer)
        note_columns()
        # Called directly rather than through vf.load_environment, which hides the exception's class.
        env = module.load_environment(**own)
        env.env_id = env.env_id or spec.id
        env.env_args = env.env_args or own
        apply_rules(members_of(env), AgentRules.decode(spec.agent_json))
        loaded = cls(env, renderer=renderer, select_json=spec.select_json)
        if table := next((each for each in (loaded.train, loaded.eval) if len(each)), None):
            refuse_unknown_arguments(env, table.row(0), client=_no_client())
        if spec.demo_key:
            rows = (_given(with_read_info(loaded.train.row(at))) for at in range(len(loaded.train)))
            require_demonstrations(rows, spec.demo_key)
        if spec.is_text_only:
            for tasks, table in (("training", loaded.train), ("held-out", loaded.eval)):
                refuse_other_parts((table.row(index).get("prompt") for index in range(len(table))), tasks=tasks)
        return loaded

    async def start(self) -> None:
        """Open the HTTP session, and set the threads in which environments run blocking code."""
        asyncio.get_running_loop().set_default_executor(EnvExecutor(_ENV_THREADS, "env"))
        os.environ.setdefault(_API_KEY_VARIABLE, "EMPTY")
        self._session = engine_access().session()

    async def close(self) -> None:
        """Close the connections to engines and the server for agents."""
        await agent_server().close()
        await engine_access().close()

    async def play(self, request: PlayGroupRequest, *, tokenizer_dir: str) -> Sequence[Outcome]:
        """Play one rollout for each member of the request's group and return the outcomes: one after the other, or as a
        group if rewards compare the members.

        Of a compared group all fail if one does. `tokenizer_dir` has the policy's tokenizer, for rendering here.
        """
        row: Any = (self.train if has_train_task(request) else self.eval).row(request.task_index)
        client = self._client(request, tokenizer_dir)
        args = sampling_args(request.sampling, is_external=request.is_external, declared=self._declared)
        compares = bool(member_of(self._env, row).requires_group_rollouts)
        with SCORED.playing() as of_play:
            if compares:
                rows: list[Any] = [dict(row) for _ in request.members]
                outputs = await self._env.run_group(
                    rows, client, request.model, args, max_retries=0, state_columns=_STATE_COLUMNS
                )
            else:
                outputs = []
                for _ in request.members:
                    output = await self._env.run_rollout(
                        row, client, request.model, args, max_retries=0, state_columns=_STATE_COLUMNS
                    )
                    outputs.append(output)
        # The library leaves an answer of 0 and an empty info out of what it returns.
        outputs = [{**{name: row.get(name) for name in ("answer", "info")}, **output} for output in outputs]
        if request.is_external:
            outcomes = [_external_outcome(output, of_play, client) for output in outputs]
        else:
            asked = AskedSampling.of(request)
            outcomes = [_outcome(output, of_play, asked) for output in outputs]
        return fail_together(outcomes) if compares else outcomes

    def _client(self, request: PlayGroupRequest, tokenizer_dir: str) -> Client:
        """Return the client that plays the request's rollouts; clients are kept for later requests.

        The client renders with the tokenizer in `tokenizer_dir` if a renderer is configured or chosen; else it posts
        chats or texts, which the engine tokenizes.
        """
        renderer = "" if request.is_external else self._choose_renderer(tokenizer_dir)
        key = (request.base_url, request.is_external, request.api_key_var, tokenizer_dir if renderer else "")
        if key not in self._clients:
            if self._session is None:
                raise RuntimeError("the adapter was not started")
            if renderer:
                client = _renderer_client(request.base_url, tokenizer_dir, renderer)
            else:
                kind = LeanCompletionsClient if self._completes_text and not request.is_external else LeanClient
                client = kind(
                    request.base_url,
                    self._session,
                    is_external=request.is_external,
                    api_key=os.environ[request.api_key_var] if request.api_key_var else "",
                )
            self._clients[key] = _watched(client, is_external=request.is_external)
        return self._clients[key]

    def _choose_renderer(self, tokenizer_dir: str) -> str:
        """Return the name of the renderer that tokenizes here; "" where the engine tokenizes.

        By default that is for environments of several turns whose model's family has a renderer of its own.
        """
        if self._renderer:
            return "" if self._renderer == NO_RENDERER else self._renderer
        has_turns = isinstance(self._env, vf.MultiTurnEnv) and not isinstance(self._env, vf.SingleTurnEnv)
        if self._completes_text or not has_turns or not tokenizer_dir or not HAS_RENDERERS:
            return ""
        # Imported here: environments of one turn do without the library and its tokenizer.
        from millrace.env_server.adapters.renderer import DEFAULT, choose_renderer

        chosen = choose_renderer(Path(tokenizer_dir))
        return "" if chosen == DEFAULT else chosen


def fail_together(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes of a play whose rewards compare its members: as they are, or all failed if one has failed.

    The members that were OK get an error that names the first failure; their status is ENGINE_LOST if that of any
    member is, else ENV_ERROR.
    """
    broken = next((outcome for outcome in outcomes if outcome.status is not RolloutStatus.OK), None)
    if broken is None:
        return list(outcomes)
    message = (
        f"rewards of this environment compare the members of a group, and one of them failed: "
        f"{broken.error_type}: {broken.error_message}"
    )
    # A lost engine is played again without blame, so it must not be hidden by another member's failure.
    is_lost = any(outcome.status is RolloutStatus.ENGINE_LOST for outcome in outcomes)
    status = RolloutStatus.ENGINE_LOST if is_lost else RolloutStatus.ENV_ERROR
    error = Outcome(
        status=status,
        error_type="GroupMemberFailed",
        error_message=message,
        frames=broken.frames,
        is_infrastructure=broken.is_infrastructure,
    )
    return [failed_like(error, of=each) if each.status is RolloutStatus.OK else each for each in outcomes]


def _watched(client: Client, *, is_external: bool) -> Client:
    """Return the client with its `get_response` replaced: it notes the text of errors about prompts that are too long
    in TOO_LONG.

    A client of an engine of ours then also refuses content parts that are not text.
    """
    stock = client.get_response

    async def get_response(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        """Do what the client's own method does; note the text of a prompt that is too long, and refuse parts that
        are not text.
        """
        if not is_external and (kind := other_part(prompt if isinstance(prompt, list) else ())):
            raise _NotTextError(refusal(kind))
        try:
            return await stock(prompt, *args, **kwargs)
        except vf.OverlongPromptError as error:
            if (state := kwargs.get("state")) is not None:
                TOO_LONG.note(str(state.get("trajectory_id") or ""), str(error))
            raise

    client.get_response = get_response
    return client


def _renderer_client(base_url: str, tokenizer_dir: str, renderer: str) -> Client:
    """Return a client of the engine at `base_url` that tokenizes here, by the renderer's name and the policy's
    tokenizer.

    Raises ValueError without a `tokenizer_dir`.
    """
    from millrace.env_server.adapters.renderer import install_span_capture, renderer_config

    if not tokenizer_dir:
        raise ValueError(
            f"the environment's args name renderer {renderer!r}, but the request has no tokenizer_manifest_key"
        )
    install_span_capture()
    return resolve_client(
        ClientConfig(
            client_type="renderer",
            renderer_config=renderer_config(renderer, tokenizer_dir),
            renderer_model_name=tokenizer_dir,
            renderer_pool_size=1,
            api_base_url=base_url,
            api_key_var=_API_KEY_VARIABLE,
            max_retries=0,  # `renderer` tries again where that helps
            extra_headers_from_state={"X-Session-ID": "trajectory_id"},
        )
    )


def _no_client() -> LeanClient:
    """Return a client without a session, for states that are never played."""
    session: Any = None
    return LeanClient("http://127.0.0.1", session)


def _no_renderers(renderer: str) -> InvalidSpecError:
    """Return the error for a renderer that is configured where the installed library has none."""
    message = (
        f"verifiers {releases.installed()}, as it is installed with the environment, tokenizes no turns on this side; "
        f'leave the key out, set it to "{NO_RENDERER}", or install verifiers 0.3.1 with `renderers`'
    )
    return InvalidSpecError([Violation(field=f"args.{RENDERER}", value=renderer, message=message)])


def _outcome(output: Mapping[str, Any], of_play: Scored, asked: AskedSampling) -> Outcome:
    """Return how a rollout ended, by the library's `output`, with its samples if it can be trained on.

    A failure is an error, a timeout, a reward that raised, a missing token, or a turn sampled in a way that the trainer
    cannot compute. `of_play` has notes of scoring that belong to no rollout, and `asked` is the run's sampling. Takes
    the rollout's model calls out of SPANS.
    """
    played = _judged(output, of_play)
    spans = SPANS.take(str(output.get("trajectory_id") or ""))
    played = replace(played, sent_instead=asked.instead(call.sent for call in spans.calls))
    try:
        if played.status is not RolloutStatus.OK:
            asked.require(spans.refused)
            return played
        turns = turns_of(output.get("trajectory") or [], spans, asked)
        played = replace(played, metrics={**played.metrics, **turns.metrics})
        if turns.are_all_cut:
            return failed(RolloutStatus.PROMPT_TOO_LONG, "PromptTooLong", turns.why_cut, of=played)
        samples = merge_turns(turns.kept, requires_spans=asked.is_training, is_agent=turns.is_agent)
    except OwnSamplingError as error:
        return failed(RolloutStatus.ENV_ERROR, error.error_type, str(error), of=played)
    except MissingTokensError as error:
        return failed(RolloutStatus.MISSING_TOKENS, error.error_type, str(error), of=played)
    except NotANumberError as error:
        return failed(RolloutStatus.ENV_ERROR, "RewardError", str(error), of=played)
    return checked(replace(played, samples=samples))


def _external_outcome(output: Mapping[str, Any], of_play: Scored, client: Client) -> Outcome:
    """Return how a rollout at a foreign endpoint ended, by the library's `output`: without samples, and with the number
    of repeated tries, which `client` has counted, as a metric.

    `of_play` has notes of scoring that belong to no rollout. A rollout without a model call is a failure.
    """
    played = _judged(output, of_play)
    steps = output.get("trajectory") or []
    if isinstance(client, LeanClient) and steps:
        num_retries = client.retries.take(str(steps[0].get("trajectory_id") or ""))
        played = replace(played, metrics={**played.metrics, RETRIES_METRIC: num_retries})
    if played.status is RolloutStatus.OK and not steps:
        return failed(RolloutStatus.MODEL_ERROR, "NoModelCall", "the rollout made no model call", of=played)
    return checked(played)


def _judged(output: Mapping[str, Any], of_play: Scored) -> Outcome:
    """Return how the rollout ended, by the library's `output`, without its tokens: its reward and metrics, or its
    failure.

    Takes the rollout's notes out of SCORED and TOO_LONG; `of_play` has notes of scoring that belong to no rollout.
    """
    steps = output.get("trajectory") or []
    rollout_id = str(output.get("trajectory_id") or "")
    scored, too_long = SCORED.take(rollout_id), TOO_LONG.take(rollout_id)
    played = Outcome(
        status=RolloutStatus.OK,
        metrics=scored.metrics_with(output.get("metrics") or {}),
        stop_condition=str(output.get("stop_condition") or ""),
        is_truncated=bool(output.get("is_truncated")),
        num_turns=len(steps),
        model_s=_model_seconds(output.get("timing") or {}),
        messages=[*_messages(output.get("prompt")), *_messages(output.get("completion"))],
        task=_given(output),
    )
    if error := output.get("error"):
        return _error_outcome(error, played)
    if output.get("timed_out") or played.stop_condition == "timeout_reached":
        message = "the environment's own deadline passed; raise its `timeout_seconds`, or what sets it in its args"
        return failed(RolloutStatus.TIMEOUT, "EnvironmentTimeout", message, of=played)
    if failures := [*scored.failures, *of_play.failures]:
        message = "; ".join(dict.fromkeys(failure.message for failure in failures))
        first = failures[0]
        return failed(RolloutStatus.ENV_ERROR, first.type, message, of=played, frames=first.frames)
    if not steps and played.stop_condition == "prompt_too_long":
        return failed(RolloutStatus.PROMPT_TOO_LONG, "PromptTooLong", explain(too_long), of=played)
    try:
        return replace(played, reward=number_of(output.get("reward")))
    except NotANumberError as error:
        message = f"the rollout's reward is {error}; let the environment's rubric set `state['reward']`"
        return failed(RolloutStatus.ENV_ERROR, "RewardError", message, of=played)


def _given(output: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a task's info, with its answer under `answer`; `output` is a row or a rollout of the
    library.

    An info that is no table is under `info`.
    """
    answer, info = output.get("answer"), output.get("info")
    found = {} if _is_nothing(info) else dict(info) if isinstance(info, Mapping) else {"info": info}
    return found if _is_nothing(answer) else {**found, "answer": answer}


def with_read_info(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a task's row with `info` parsed if that is a text of JSON, as the library does when it plays the task.

    A row with any other info is returned as it is.
    """
    info = row.get("info")
    if not isinstance(info, str):
        return row
    try:
        return {**row, "info": decode_json(info.encode(), what="a task's info", reason="ENV_LOAD_FAILED")}
    except CorruptObjectError:
        return row


def _is_nothing(value: Any) -> bool:
    """Return whether the value is None or "", which the library has for a missing field; 0, False and [] are values."""
    return value is None or (isinstance(value, str) and not value)


def _error_outcome(error: BaseException, played: Outcome) -> Outcome:
    """Return the failure of a rollout that ended with the exception `error`: its class and text decide the status.

    The message has the texts of `error` and its causes. Conversation and metrics are those of `played`.
    """
    kind, message = type(error).__name__, repr(ErrorChain(error))
    if isinstance(error, _NotTextError):
        message, status = str(error), RolloutStatus.ENV_ERROR
    elif ENGINE_LOST_MARK in message:
        kind, status = "EngineLostError", RolloutStatus.ENGINE_LOST
    elif kind == "OverlongPromptError":
        status = RolloutStatus.PROMPT_TOO_LONG
    elif "MalformedGenerateResponseError" in message:
        status = RolloutStatus.MISSING_TOKENS
    elif kind in _MODEL_ERRORS:
        status = RolloutStatus.MODEL_ERROR
    else:
        status = RolloutStatus.ENV_ERROR
    return failed(status, kind, message, of=played, frames=frames_of(error), is_infrastructure=is_engine_fault(error))


def _messages(value: Any) -> list[Mapping[str, Any]]:
    """Return a prompt or completion of the library, a text or a list of messages, as JSON objects; others are left
    out.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    shown: list[Mapping[str, Any]] = []
    for item in value or ():
        if isinstance(item, BaseModel):
            shown.append(item.model_dump(mode="json", exclude_none=True))
        elif isinstance(item, Mapping):
            shown.append(item)
    return shown


def _model_seconds(timing: Mapping[str, Any]) -> float:
    """Return the seconds that a rollout's model calls took in all, by the library's record `timing`."""
    spans = (timing.get("model") or {}).get("spans") or ()
    return float(sum(max(0.0, span.get("end", 0.0) - span.get("start", 0.0)) for span in spans))


# The sampling of v0's model calls: the run's, filled with that of the environment's constructor (`sampling_args`).
#
# The library's own `generate` (0.1.14 and 0.3.1) uses an environment's `sampling_args` where its caller passes none;
# `run_rollout`, which trainers call, ignores them. Here they apply where the run's value is neutral. Of a group of
# environments those of the group apply, as with the library, and not those of its members.

_ARGUMENTS = ("temperature", "max_tokens", "top_p")
"""Parameters of OpenAI's API; the rest goes into `extra_body`."""
_TOKENS = ("max_tokens", "max_completion_tokens")
_ONE_ANSWER = ("n", 1)  # the library's own default


def declared_by(env: Any) -> dict[str, Any]:
    """Return the sampling that an environment's constructor sets, as one flat table, without the library's default
    `n = 1`.
    """
    declared = flat(getattr(env, "sampling_args", None) or {})
    return {name: value for name, value in declared.items() if (name, value) != _ONE_ANSWER}


def sampling_args(
    sampling: Sampling, *, is_external: bool = False, declared: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the sampling that a run asks for in the form of v0's `sampling_args`.

    `declared`, the environment's own or None, applies where the run's value is the neutral one. Parameters that
    OpenAI's API does not have are in `extra_body`; an external endpoint gets fewer.
    """
    parameters = request_parameters(sampling, is_external=is_external)
    if declared:
        parameters = _filled(parameters, declared, holds_temperature=sampling.holds_temperature)
    args = {name: parameters.pop(name) for name in _ARGUMENTS if name in parameters}
    return args | ({"extra_body": parameters} if parameters else {})


def _filled(asked: Mapping[str, Any], declared: Mapping[str, Any], *, holds_temperature: bool) -> dict[str, Any]:
    """Return the run's parameters `asked`, each with the environment's `declared` value where the run's is the neutral
    one.

    With `holds_temperature` the run's temperature counts as chosen even if neutral. A token limit of the run replaces
    any token limit of the environment.
    """
    chosen = {name: value for name, value in asked.items() if name not in NEUTRAL or value != NEUTRAL[name]}
    if holds_temperature:
        chosen["temperature"] = asked["temperature"]
    if any(name in chosen for name in _TOKENS):
        declared = {name: value for name, value in declared.items() if name not in _TOKENS}
    return {**asked, **declared, **chosen}
