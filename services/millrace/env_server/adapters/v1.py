"""Adapter of `verifiers` v1 environments: packages that export a Taskset.

Runs a role that has no harness of its own in this process (`runtimes_v1`), with the train client, which tokenizes with
the policy's own tokenizer and asks the engine for exact tokens. Args of the environment go to its taskset, except
`renderer`, `env`, `eval_args` and `num_tasks` where the taskset has no such option (see `selection`).
"""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import verifiers.v1 as vf
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.utils.loaders import taskset_config_type
from verifiers.v1.utils.retries import run_episode_with_retry

from millrace.env_server.adapters import judges, runtimes_v1, watched_v1
from millrace.env_server.adapters.failures import frames_of, our_spelling, refuse_other_parts, remember_roles
from millrace.env_server.adapters.library_tasksets import (
    options_checked,
    require_data,
    require_packages,
    tasks_checked,
)
from millrace.env_server.adapters.outcome import Outcome, checked, failed, failed_like, require_demonstrations
from millrace.env_server.adapters.renderer import (
    DEFAULT,
    MISSING_TOKENS_MARK,
    UNREADABLE_MARK,
    choose_renderer,
    install_span_capture,
    renderer_config,
)
from millrace.env_server.adapters.runtimes_v1 import (
    check_default_runtime,
    check_runtimes,
    check_task_fits,
    tool_servers,
    with_roles,
)
from millrace.env_server.adapters.samples import SPANS, MissingTokensError
from millrace.env_server.adapters.samples_v1 import branch_samples, kept_nodes, merged, timeout_remedy
from millrace.env_server.adapters.selection import (
    OURS,
    RENDERER,
    V1_ENV,
    V1_EVAL_ARGS,
    V1_NUM_TASKS,
    TaskTable,
    selected_tables,
    split_args,
    stop_of,
    table_of,
    tasks_of,
)
from millrace.env_server.adapters.watched_v1 import refuse_unknown_arguments
from millrace.env_server.agents import v1 as agents
from millrace.env_server.agents.branches import LEFT_OUT_METRIC
from millrace.env_server.agents.programs import cause_first
from millrace.env_server.agents.sessions import AgentRules
from millrace.env_server.engine_access import ENGINE_LOST_MARK, engine_access
from millrace.env_server.library import v1
from millrace.env_server.library import v1 as interception
from millrace.env_server.library import v1 as relaying
from millrace.env_server.library.endpoints import explain_trace, watch_v1
from millrace.env_server.library.lookups import remember_lookups
from millrace.env_server.library.v1 import OUTGROWN, is_too_long, stop_what_outgrows
from millrace.env_server.own_sampling import AskedSampling, OwnSamplingError, flat
from millrace.errors import InvalidSpecError, Violation
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest
from millrace.rollouts.requests import LoadedEnv, has_train_task, request_parameters
from millrace.rollouts.types import RolloutStatus, Trace

_API_KEY_VARIABLE = "MILLRACE_ENGINE_API_KEY"
_OUR_ARGS = (RENDERER, V1_ENV, V1_EVAL_ARGS, V1_NUM_TASKS)
# Of an endless taskset; a run needs a number.
_DEFAULT_NUM_TASKS = 10_000
# Rollouts that share one tokenizer copy of about 80 MB; more than a worker plays at once.
_MAX_ROLLOUTS_PER_RENDERER = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTraces:
    """Whether an episode may have several trainable traces, and whether it has, as far as its config tells."""

    takes_several: bool
    has_several: bool
    rules: AgentRules
    """Which model calls of a trace are trained on, and what limits agents have."""


class V1Adapter:
    """A loaded v1 environment."""

    def __init__(
        self, env: Any, *, tables: tuple[TaskTable, TaskTable], renderer: str, traces: "ExpectedTraces"
    ) -> None:
        """Take a loaded environment with its tables of training and of evaluated tasks.

        `renderer` is the one that the user configured, or "" to choose by the policy. `traces` is how many trained
        traces its episodes may have.
        """
        self._env = env
        self._traces = traces
        self._renderer = renderer
        self._has_tools = bool(tool_servers(env))
        self._stack = contextlib.AsyncExitStack()
        self.train, self.eval = tables
        # v1 has no group rewards: every trace is scored alone.
        self.loaded = LoadedEnv(api="v1", requires_group=False, train=self.train, eval=self.eval)

    @classmethod
    def load(cls, spec: EnvSpec, args: Mapping[str, Any]) -> Self:
        """Build and check the environment that `spec` names, with its tasks, and return its adapter.

        `args` are the user's. Exceptions of the environment's code pass through. Replaces methods of the library in
        this process, for the gate of judges. Raises InvalidSpecError if the environment cannot be played as the run
        config asks.
        """
        takes_several = spec.takes_several_traces
        judges.JudgeGate(max_concurrent=spec.judge_max_concurrent, timeout_s=spec.judge_timeout_s).install()
        watched_v1.mark_scoring()
        # Sort the arguments: those of the taskset, and those that Millrace reads.
        options = taskset_config_type(spec.id).model_fields
        require_packages(spec.id)
        own, ours = split_args(args, keys=_OUR_ARGS, options=options)
        where = f"args.{OURS}.{V1_ENV}" if V1_ENV in options else f"args.{V1_ENV}"
        remember_roles(where)
        renderer = str(ours.get(RENDERER) or "")
        extra = table_of(ours.get(V1_ENV), where=where)
        eval_args = ours.get(V1_EVAL_ARGS)
        num_tasks = int(ours.get(V1_NUM_TASKS, max(_DEFAULT_NUM_TASKS, stop_of(spec.select_json))))
        # Make the environment, and check that a run can play and train it.
        env = vf.load_environment(_config(spec.id, own, extra, where=where))
        check_runtimes(env, where=where)
        require_data(env.taskset)
        trained = check_trainable(env, takes_several=takes_several, where=where)
        rules = AgentRules.decode(spec.agent_json)
        _require_own_loop(env, rules)
        traces = ExpectedTraces(takes_several=takes_several, has_several=trained.has_several, rules=rules)
        # List its tasks, and check them as the run's config asks.
        held_out = None
        if eval_args is not None:
            taskset = vf.load_taskset(_config(spec.id, {**own, **eval_args}, extra, where=where).taskset)
            with tasks_checked(spec.id, taskset, {**own, **eval_args}):
                held_out = tasks_of(taskset, num_tasks)
        with tasks_checked(spec.id, env.taskset, own):
            train = tasks_of(env.taskset, num_tasks)
        tables = selected_tables(spec.select_json, train=train, held_out=held_out, is_mixed=False)
        loaded = cls(env, tables=tables, renderer=renderer, traces=traces)
        loaded.loaded = replace(loaded.loaded, declared=declared_sampling(env, trained, where=where))
        tables = [table for table in (loaded.train, loaded.eval) if len(table)]
        refuse_unknown_arguments(table.row(0) for table in tables)
        if len(loaded.train):
            check_default_runtime(env, loaded.train.row(0), extra, where=where)
            check_task_fits(env, loaded.train.row(0), where=where)
        if spec.demo_key:
            rows = (own_data(loaded.train.row(at).data) for at in range(len(loaded.train)))
            require_demonstrations(rows, spec.demo_key)
        if spec.is_text_only:
            for tasks, table in (("training", loaded.train), ("held-out", loaded.eval)):
                refuse_other_parts((table.row(index).data.prompt for index in range(len(table))), tasks=tasks)
        return loaded

    async def start(self) -> None:
        """Replace functions of the library in this process by Millrace's, and start the interception server and shared
        tools.

        Server and tools run until `close`.
        """
        os.environ.setdefault(_API_KEY_VARIABLE, "EMPTY")
        install_span_capture()
        watched_v1.keep_whole_traces()
        watched_v1.take_numbers()
        watched_v1.refuse_other_parts_of_chats()
        watch_v1()
        stop_what_outgrows()
        remember_lookups()
        interception.install_interception()
        agents.install(self._traces.rules)
        v1.install_rendering()
        relaying.install_relaying()
        self._stack.push_async_callback(engine_access().close)
        await self._stack.enter_async_context(self._env.serving())

    async def close(self) -> None:
        """Stop the interception server and shared tools that `start` has started, and close the connections to
        engines.
        """
        await self._stack.aclose()

    async def play(self, request: PlayGroupRequest, *, tokenizer_dir: str) -> Sequence[Outcome]:
        """Play one episode of the request's task for each member, one after the other, and return the outcomes.

        `tokenizer_dir` has the policy's tokenizer. Raises ValueError if it is "" and the engine is ours. Fails all
        members if the environment has tools and the policy's tool calls cannot be parsed.
        """
        if not tokenizer_dir and not request.is_external:
            raise ValueError("v1 environments tokenize on the client side: the request needs a tokenizer_manifest_key")
        task = (self.train if has_train_task(request) else self.eval).row(request.task_index)
        if not request.is_external and (why := self._no_tool_parser(tokenizer_dir)):
            return [failed(RolloutStatus.ENV_ERROR, "NoToolParser", why)] * len(request.members)
        context = vf.ModelContext(
            model=request.model,
            client=self._client_config(request, tokenizer_dir),
            sampling=vf.SamplingConfig(**request_parameters(request.sampling, is_external=request.is_external)),
        )
        outcomes: list[Outcome] = []
        for _ in request.members:
            again = partial(self._env.run_episode, task, context)
            episode = await run_episode_with_retry(again, self._env.config.retries)
            asked = None if request.is_external else AskedSampling.of(request)
            outcomes.append(_outcome(episode, self._traces, asked))
        return outcomes

    def _no_tool_parser(self, tokenizer_dir: str) -> str:
        """Return why tool calls of the policy, whose tokenizer is in `tokenizer_dir`, cannot be parsed.

        "" if they can be, or if the environment has no tools.
        """
        name = self._renderer or choose_renderer(Path(tokenizer_dir))
        if name != DEFAULT or not self._has_tools:
            return ""
        return (
            "the environment offers tools, and the tool calls of this model are of no known format; set `renderer` in "
            "the environment's args (`orchestrator.env.args.renderer`) to that of the model's family, such as "
            '"qwen3", or train a model whose chat template is that of its family'
        )

    def _client_config(self, request: PlayGroupRequest, tokenizer_dir: str) -> Any:
        """Return the config of the library's client for the request: of its train client, which gives exact tokens.

        For a foreign endpoint it is the config of the relaying client, which gives none.
        """
        if request.is_external:
            return vf.EvalClientConfig(base_url=request.base_url, api_key_var=request.api_key_var or _API_KEY_VARIABLE)
        return vf.TrainClientConfig(
            base_url=request.base_url,
            api_key_var=_API_KEY_VARIABLE,
            renderer_model_name=tokenizer_dir,
            renderer=renderer_config(self._renderer, tokenizer_dir),
            multiplex=_MAX_ROLLOUTS_PER_RENDERER,
        )


def _config(env_id: str, taskset_args: Mapping[str, Any], extra: Mapping[str, Any], *, where: str) -> Any:
    """Return the environment's config, made of its id, the taskset's args, and `extra`, the other keys.

    `where` is the key of `extra` in messages. Raises InvalidSpecError for options that are not valid.
    """
    base = {**extra, "taskset": {"id": env_id, **taskset_args}}
    with options_checked(roles=where):
        return vf.resolve_env_config(with_roles(base, harness=runtimes_v1.register(), where=where))


def _outcome(episode: Any, expected: ExpectedTraces, asked: AskedSampling | None) -> Outcome:
    """Return how an episode ended, with its samples if it can be trained on.

    A failure is an error or timeout, a missing reward or token, several traces where one is expected, or a turn sampled
    in a way that the trainer cannot compute. `asked` is the run's sampling; it is None for an endpoint that is not
    ours, which sends no tokens. Takes the model calls of all traces out of SPANS.
    """
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    # Of all traces, so that those which are not trained leave nothing in SPANS, either.
    spans = {trace.id: SPANS.take(trace.id) for trace in episode.traces}
    each = [_played(trace) for trace in traces] or [Outcome(status=RolloutStatus.OK)]
    # An algorithm that compares agents needs their names even where one of them did not play.
    names_agents = expected.takes_several and (expected.has_several or len(traces) > 1)
    played = merged([trace.agent.name for trace in traces], each) if traces and names_agents else each[0]
    if asked is not None:
        calls = [call for trace in traces for call in spans[trace.id].calls]
        played = replace(played, sent_instead=asked.instead(call.sent for call in calls))
    for trace, own in zip(traces or [None], each, strict=True):
        if failure := _failure(episode, trace, own):
            # A parameter of the environment's own that the engine refused is the cause, and is named in place of the
            # error.
            try:
                if asked is not None and trace is not None:
                    asked.require(spans[trace.id].refused)
            except OwnSamplingError as error:
                return failed(RolloutStatus.ENV_ERROR, error.error_type, str(error), of=played)
            return failed_like(failure, of=played)
    if len(traces) != 1 and not expected.takes_several:
        message = f"the episode has {len(traces)} trainable traces, and {ONE_TRACE}; {SEVERAL_TRACES}"
        return failed(RolloutStatus.ENV_ERROR, "MultipleTraces", message, of=played)
    kept = {trace.id: kept_nodes(trace, expected.rules.branches) for trace in traces}
    if left_out := sum(sum(node.sampled for node in trace.nodes) - len(kept[trace.id]) for trace in traces):
        played = replace(played, metrics={**played.metrics, LEFT_OUT_METRIC: float(left_out)})
    try:
        samples = [
            branch_samples(
                trace.branches,
                spans[trace.id],
                requires_spans=asked.is_training,
                asked=asked,
                kept=kept[trace.id],
            )
            if asked is not None
            else ()
            for trace in traces
            if trace.num_turns or not names_agents  # who never moved has nothing to learn from
        ]
    except OwnSamplingError as error:
        return failed(RolloutStatus.ENV_ERROR, error.error_type, str(error), of=played)
    except MissingTokensError as error:
        message = _replaced_replies(traces) or str(error)
        return failed(RolloutStatus.MISSING_TOKENS, error.error_type, message, of=played)
    if not samples:
        return failed(RolloutStatus.MISSING_TOKENS, "MissingTokens", "no agent made a model call", of=played)
    moved = [(trace, own) for trace, own in zip(traces, each, strict=True) if trace.num_turns]
    named = (
        [
            Trace(agent=str(trace.agent.name), reward=own.reward, num_samples=len(cut), num_turns=own.num_turns)
            for (trace, own), cut in zip(moved, samples, strict=True)
        ]
        if names_agents
        else []
    )
    return checked(replace(played, samples=[sample for cut in samples for sample in cut], traces=named))


def _replaced_replies(traces: Sequence[Any]) -> str:
    """Return a message about replies that the environment replaced, which have no tokens; "" if it replaced none."""
    handlers = sorted({record.handler for trace in traces for record in trace.response_rewrites})
    if not handlers:
        return ""
    return (
        f"`{', '.join(handlers)}` of the environment (`@intercept`) replaced a reply of the policy by a text that the "
        "policy did not sample, and which cannot be trained on; end the rollout with a `@stop` instead, or score it"
    )


def _played(trace: Any) -> Outcome:
    """Return a trace as an OK outcome, without samples: with its reward, metrics, and the messages of its last
    branch.
    """
    branches = trace.branches
    shown = branches[-1].messages if branches else ()
    rewards = {f"reward/{name}": reward.score for name, reward in trace.rewards.items() if reward is not None}
    return Outcome(
        status=RolloutStatus.OK,
        reward=float(trace.reward),
        metrics={**rewards, **trace.metrics},
        stop_condition=str(trace.stop_condition or ""),
        is_truncated=bool(trace.is_truncated) or trace.stop_condition == OUTGROWN,
        num_turns=int(trace.num_turns),
        model_s=float(sum(call.time.duration for call in trace.calls)),
        messages=[message.model_dump(mode="json", exclude_none=True) for message in shown],
        task=_given(trace),
    )


def _given(trace: Any) -> dict[str, Any]:
    """Return what a trace's task has to be scored with: its data's own fields (`own_data`), and the trace's `info`."""
    return own_data(trace.task.data) | (trace.info or {})


def own_data(data: Any) -> dict[str, Any]:
    """Return the fields of a task's data that the library's base class does not have, such as its answer, without
    None.
    """
    return {
        name: value
        for name, value in data.model_dump().items()
        if name not in vf.TaskData.model_fields and value is not None
    }


def _failure(episode: Any, trace: Any, played: Outcome) -> Outcome | None:
    """Return an episode's failure as an outcome with the conversation of `played`; None if it did not fail.

    `trace` is the trained trace that `played` was made of, None if there is none. The first of these is returned:
    deadline, context length, lost engine, error, missing reward.
    """
    errors = _errors(episode)
    error = errors[0] if errors else None
    stop = played.stop_condition
    # 0.4 marks a timed-out trace and still calls the episode ok; 0.3 records an error that says so.
    is_timeout = any(getattr(thing, "is_timeout", False) for thing in (episode, *episode.traces))
    is_of_others = error is not None and error.type in ("ProviderError", *judges.TYPES)
    says_timeout = error is not None and not is_of_others and "timed out" in error.message.lower()
    says_timeout = says_timeout or (error is not None and "agent timeout" in error.message)
    if is_timeout or says_timeout or stop.endswith("_timeout"):
        message = error.message if error else f"stopped by {stop or 'a deadline'} of the environment"
        message = f"{our_spelling(message)}; {timeout_remedy(message, trace)}"
        return failed(RolloutStatus.TIMEOUT, "EnvironmentTimeout", message, of=played)
    if not played.num_turns and is_too_long(stop, error):
        return failed(RolloutStatus.PROMPT_TOO_LONG, "PromptTooLong", explain_trace(episode, error), of=played)
    if lost := next((each for each in errors if ENGINE_LOST_MARK in each.message), None):
        return failed(RolloutStatus.ENGINE_LOST, "EngineLostError", lost.message, of=played)
    if error is not None:
        frames = frames_of(error.traceback or "")
        is_fault = error.type == "ProviderError" and error.status_code is not None and error.status_code >= 500
        is_fault = is_fault and not any(mark in error.message for mark in (MISSING_TOKENS_MARK, UNREADABLE_MARK))
        return failed(
            _error_status(error),
            error.type,
            our_spelling(cause_first(error.message)),
            of=played,
            frames=frames,
            is_infrastructure=is_fault,
        )
    if not episode.ok or trace is None or not trace.ok:
        message = "the episode did not complete and recorded no error"
        return failed(RolloutStatus.ENV_ERROR, "EpisodeNotOk", message, of=played)
    if missing := sorted(name for name, reward in trace.rewards.items() if reward is None):
        return failed(
            RolloutStatus.ENV_ERROR, "RewardError", f"rewards without a value: {', '.join(missing)}", of=played
        )
    return None


def _errors(episode: Any) -> list[Any]:
    """Return the errors of the traces and of the episode if they did not end well, the cause first.

    A trace or an episode that was repeated (`retries`) has the errors of each attempt, the last attempt's last: they
    are returned in reverse. Traces and episodes that ended well have errors of earlier attempts, which are left out.
    """
    if episode.ok:
        return []
    found: list[Any] = []
    for trace in episode.traces:
        if not trace.ok:
            retries = trace.agent.config.retries
            is_repeated = retries.max_retries or getattr(retries, "rules", ())  # rules are of 0.4
            found += reversed(trace.errors) if is_repeated else trace.errors
    return [*found, *reversed(episode.errors)]


def _error_status(error: Any) -> RolloutStatus:
    """Return the status of a rollout that failed with an error which the library recorded."""
    if MISSING_TOKENS_MARK in error.message:
        return RolloutStatus.MISSING_TOKENS
    if error.type == "OverlongPromptError":
        return RolloutStatus.PROMPT_TOO_LONG
    if error.type == "ProviderError":
        return RolloutStatus.MODEL_ERROR
    return RolloutStatus.ENV_ERROR


# Whether the episodes of a v1 environment end with as many trainable traces as the run's algorithm takes.
#
# An environment of several trained roles, or of several attempts at a task in one episode, has more than one. Where
# the algorithm takes one per rollout, the environment is refused when it is loaded: else every rollout of it would
# fail, one by one.

_SETUP_S = 10.0
_BEST_OF_N = "BestOfNEnvConfig"
ONE_TRACE = "the algorithm of this environment trains one trace per rollout"
SEVERAL_TRACES = (
    'set `orchestrator.algo.type` (or `algo` of the `[[orchestrator.env]]`) to "rae" or "hierarchical_grpo"'
)
"""What to do where there are more."""

logger = logging.getLogger(__name__)


class _Roles:
    """Replaces the agents of an episode: each is trainable until `Env.setup` says otherwise."""

    def __init__(self, configs: Mapping[str, AgentConfig]) -> None:
        """Make a trainable role for each of the configs, by name."""
        self._roles = {
            name: SimpleNamespace(name=name, config=config, trainable=True) for name, config in configs.items()
        }

    def __getattr__(self, name: str) -> SimpleNamespace:
        if name.startswith("_") or name not in self._roles:
            raise AttributeError(name)
        return self._roles[name]

    def __iter__(self) -> Iterator[SimpleNamespace]:
        return iter(self._roles.values())

    def __len__(self) -> int:
        return len(self._roles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Which traces of an environment are trained, as far as its config tells."""

    has_several: bool
    """Whether an episode has several trainable traces."""
    roles: Sequence[str]
    """The roles that are known to be trained."""


def check_trainable(env: Any, *, takes_several: bool, where: str) -> Trained:
    """Return which traces of an environment's episodes are trained.

    Raises InvalidSpecError if none is, or several are and `takes_several` is False. Runs the environment's `setup`,
    outside of an event loop. Environments whose code decides only in an episode pass. `where` is the config's key in
    messages.
    """
    attempts = list(_several_attempts(env.config, where=where))
    configs = {name: value for name, value in env.config if isinstance(value, AgentConfig)}
    trained = _trained_roles(env, configs)
    is_wrong = trained is not None and (not trained or (len(trained) > 1 and not takes_several))
    wrong = [] if takes_several else attempts
    if is_wrong:
        wrong = [*wrong, _not_one_role(env, trained or [], where=where)]
    if wrong:
        raise InvalidSpecError(wrong)
    return Trained(has_several=bool(attempts) or len(trained or ()) > 1, roles=trained or ())


def declared_sampling(env: Any, trained: Trained, *, where: str) -> dict[str, dict[str, Any]]:
    """Return the sampling that the environment's config or code sets for trained roles, by the key of each.

    `where` is the key of the config that has the roles. Roles without sampling are left out.
    """
    roles = {name: getattr(env.config, name) for name in trained.roles}
    declared = {
        name: flat(role.sampling.model_dump(exclude_unset=True)) for name, role in roles.items() if role.sampling
    }
    return {f"`{where}.{name}.sampling`": fields for name, fields in declared.items() if fields}


def _several_attempts(config: Any, *, where: str) -> Iterator[Violation]:
    """Yield a violation for each key by which an episode makes several attempts, and so has several trained traces.

    `config` is the environment's, and `where` its key.
    """
    keys = ["attempts", *(["n"] if any(base.__name__ == _BEST_OF_N for base in type(config).__mro__) else [])]
    for key in keys:
        count = getattr(config, key, 1)
        if isinstance(count, int) and count > 1:
            message = (
                f"must be 1: an episode of {count} attempts has {count} trainable traces, and {ONE_TRACE}; for several "
                "attempts at a task that are compared with each other use `orchestrator.rollouts_per_example`, or "
                f"{SEVERAL_TRACES}"
            )
            yield Violation(field=f"{where}.{key}", value=str(count), message=message)


def _not_one_role(env: Any, trained: Sequence[str], *, where: str) -> Violation:
    """Return the violation of an environment that trains these roles where one is allowed; `where` is its config's
    key.
    """
    names = ", ".join(trained) or "none"
    kind = type(env).__name__
    if trained:
        remedy = f"{SEVERAL_TRACES}, or let `{kind}.setup` mark all roles but one `trainable = False`"
    else:
        remedy = f"let `{kind}.setup` leave a role trainable"
    message = f"{kind} trains {len(trained)} of its roles ({names}), and {ONE_TRACE}; {remedy}"
    return Violation(field=where, message=message)


def _trained_roles(env: Any, configs: Mapping[str, AgentConfig]) -> list[str] | None:
    """Run `Env.setup` on substitutes for the agents, by the config of each role, and return the roles that it leaves
    trainable.

    None if it raises or takes too long, which is not known before an episode.
    """
    roles = _Roles(configs)

    async def set_up() -> None:
        """Run the environment's `setup` on the roles, with a time limit."""
        async with asyncio.timeout(_SETUP_S):
            await env.setup(roles)

    try:
        asyncio.run(set_up())
    except Exception as error:  # environment code: its episodes will say what is wrong with it
        logger.debug("the roles of the environment are unknown before an episode", exc_info=error)
        return None
    return [role.name for role in roles if role.trainable]


def _require_own_loop(env: Any, rules: AgentRules) -> None:
    """Raise InvalidSpecError if the run limits agents and all roles have our own harness, which has no loop of its
    own to limit.
    """
    roles = [value for _, value in env.config if isinstance(value, AgentConfig)]
    harnesses = {role.harness.id for role in roles if role.harness is not None}
    if rules.limits and harnesses == {runtimes_v1.HARNESS_ID}:
        message = "has limits of agents with a loop of their own, and no role of this environment has such a harness"
        raise InvalidSpecError([Violation(field="agent", value=json.dumps(rules.limits), message=message)])
