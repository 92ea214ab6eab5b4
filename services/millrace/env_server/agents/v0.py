"""Environments of v0 whose rollouts are played by an agent with a loop of its own."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import verifiers as vf

from millrace.env_server.agents.asked import AgentRequest
from millrace.env_server.agents.branches import DEFAULT, trained_calls
from millrace.env_server.agents.programs import AgentFailedError
from millrace.env_server.agents.server import agent_server
from millrace.env_server.agents.sessions import AgentAddress, AgentLimits, AgentRules, AgentSession, CallRefusedError
from millrace.env_server.engine_access import ENGINE_LOST_MARK
from millrace.env_server.library.v0 import TimeSpan, Tool, normalize_messages
from millrace.errors import InvalidSpecError, Violation

IS_TRAINED = "is_trained"
"""Key of a step's `extras`: false where its branch is not trained on."""
_PROBLEM = "agent_problem"
ENDED = "agent_ended"
"""Stop condition of a rollout whose agent ended by itself."""


class AgentError(vf.Error):
    """The agent failed."""


class AgentEnv(vf.MultiTurnEnv):
    """Opens an address for the agent of each rollout and calls `run_agent`; each model call is a step of the rollout.

    Rewards are those of any other environment: the rubric sees `state["trajectory"]`, the last conversation as
    `completion`, and whatever `run_agent` has put into `state`.
    """

    branches = DEFAULT
    """Which calls are trained on (`agents.branches`); the run config sets it."""

    def __init__(self, *, limits: AgentLimits | None = None, drops: Sequence[str] = (), **kwargs: Any) -> None:
        """Make the environment with limits for its agent, none by default.

        `drops` are request parameters, such as `tool_choice`, that are ignored rather than refused; `kwargs` are the
        library's.
        """
        super().__init__(**kwargs)
        self.limits = limits or AgentLimits()
        self.drops = tuple(drops)

    async def run_agent(self, address: AgentAddress, state: vf.State) -> None:
        """Run the agent of one rollout to its end (to be overridden).

        The policy answers at `address` until this returns. What is written into `state` is for the rubric.
        """
        raise NotImplementedError(f"{type(self).__name__} has no run_agent(address, state)")

    async def env_response(self, messages: Any, state: vf.State, **kwargs: Any) -> Any:
        """Return an empty list: the agent itself continues the conversation."""
        return []

    async def rollout(  # type: ignore[override] - final for the library's loop, which this one is not
        self, input: Any, client: Any, model: str, sampling_args: dict[str, Any] | None = None
    ) -> vf.State:
        """Play a task by running the agent at an address of its own, and return the state.

        `input` is the task's row, and the other arguments are those of the library's `rollout`. A vf.Error is put into
        `state["error"]` and a missed deadline marked as a timeout; other exceptions are raised.
        """
        state = await self.init_state(input, client, model, sampling_args)
        state["timing"].generation.start = time.time()
        deadline = asyncio.timeout(self.timeout_seconds)
        try:
            async with deadline:
                await self.setup_state(state)
                ask = partial(self._ask, state)
                async with agent_server().opened(ask, model=model, limits=self.limits, drops=self.drops) as opened:
                    await self._run(*opened, state)
        except TimeoutError:
            if not deadline.expired():
                raise
            self.mark_timed_out(state)
        except vf.Error as error:
            state["error"] = error
        finally:
            state["is_completed"] = True
            await self.cleanup(state)
        return state

    async def _run(self, address: AgentAddress, session: AgentSession, state: vf.State) -> None:
        """Run the agent, then close its session, mark in each step whether it is trained on, and set the stop
        condition.

        Raises the vf.Error of the last model call if that has failed, except for a prompt that is too long, which is a
        stop condition; else AgentError if the agent's program failed by itself.
        """
        problem: Exception | None = None
        try:
            await self.run_agent(address, state)
        except AgentFailedError as error:
            refused = f" (the last refused request: {session.last_refusal})" if session.last_refusal else ""
            problem = AgentError(f"{error}{refused}")
            problem.__cause__ = error
        finally:
            session.close()
            kept = trained_calls(session.made, self.branches)
            for index, step in enumerate(state["trajectory"]):
                step["extras"][IS_TRAINED] = index in kept
        # A failure on the policy's side is the cause of the agent's own error.
        problem = state.get(_PROBLEM) or problem
        if isinstance(problem, vf.OverlongPromptError):
            state["prompt_too_long"] = state["is_truncated"] = True
            state["stop_condition"] = "prompt_too_long"
        elif problem is not None:
            raise problem
        elif session.is_late:
            self.mark_timed_out(state)
        else:
            state["stop_condition"] = ENDED

    async def _ask(self, state: vf.State, asked: AgentRequest) -> Mapping[str, Any]:
        """Make one model call for the agent, add it to the rollout's steps, and return a chat completion.

        Raises CallRefusedError if it fails; the error is kept in `state` as the rollout's problem.
        """
        prompt = normalize_messages(list(asked.messages), field_name="messages")
        tools = [Tool(**tool["function"]) for tool in asked.tools]
        begun = time.time()
        try:
            response = await self.get_model_response(
                state, prompt, tool_defs=tools, sampling_args=_sampling(state["sampling_args"] or {}, asked)
            )
        except vf.Error as error:
            state[_PROBLEM] = error
            raise _refused(error) from error
        # The agent has tried again with success, so the earlier failure does not end the rollout.
        state[_PROBLEM] = None
        state["timing"].model.spans.append(TimeSpan(start=begun, end=time.time()))
        await self.add_model_response(state, prompt, response)
        return _completion(response)


def apply_rules(members: Iterable[Any], rules: AgentRules) -> None:
    """Set `branches` of the agents among `members` as the run config says, and put its limits over their own.

    Raises InvalidSpecError if the config sets rules and no member is an `AgentEnv`.
    """
    agents = [member for member in members if isinstance(member, AgentEnv)]
    if rules.is_set and not agents:
        message = "is of environments whose rollouts an agent plays (AgentEnv); leave it out"
        raise InvalidSpecError([Violation(field="agent", message=message)])
    for member in agents:
        member.branches = rules.branches
        member.limits = rules.over(member.limits)
        member.timeout_seconds = rules.limits.get("deadline_s", member.timeout_seconds)


def _sampling(run: Mapping[str, Any], asked: AgentRequest) -> dict[str, Any]:
    """Return the run's sampling, with a lower `max_tokens` and further `stop` strings if the agent asks for them."""
    args = dict(run)
    limits = [limit for limit in (args.get("max_tokens"), asked.max_tokens) if limit]
    if limits:
        args["max_tokens"] = min(limits)
    if asked.stop:
        own = args.get("stop") or []
        args["stop"] = [*([own] if isinstance(own, str) else own), *asked.stop]
    return args


def _refused(error: Exception) -> CallRefusedError:
    """Return the HTTP refusal, for the agent, of a model call that failed with `error`."""
    if isinstance(error, vf.OverlongPromptError):
        return CallRefusedError(400, f"context_length_exceeded: {error}", param="messages")
    if ENGINE_LOST_MARK in str(error):
        return CallRefusedError(503, "the engine went away; the rollout will be played again")
    return CallRefusedError(502, f"{type(error).__name__}: {error}")


def _completion(response: Any) -> dict[str, Any]:
    """Convert the library's response to a chat completion with one choice."""
    message, usage = response.message, response.usage
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls or ()
    ]
    finish = message.finish_reason or ("tool_calls" if calls else "stop")
    message_fields = {"content": message.content, "reasoning_content": message.reasoning_content, "tool_calls": calls}
    counts = {} if usage is None else {name: getattr(usage, name) for name in ("prompt_tokens", "completion_tokens")}
    return {"choices": [{"message": message_fields, "finish_reason": finish}], "usage": counts}
