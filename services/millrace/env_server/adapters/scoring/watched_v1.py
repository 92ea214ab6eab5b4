"""What our engines and judges need of the library's v1, put into its classes: once in a worker, before it plays."""

import asyncio
import functools
import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients.train import TrainClient

from millrace.env_server import engine_access
from millrace.env_server.adapters.failures import trace_text
from millrace.env_server.adapters.outcome import NotANumberError, number_of
from millrace.env_server.adapters.scoring import judges
from millrace.env_server.adapters.text_only import not_text_error, other_part, refusal
from millrace.env_server.agents import v1 as agents

_NotTextError = not_text_error(vf.TaskError)
_JUDGE_ERRORS = {kind: type(kind, (vf.TaskError,), {}) for kind in judges.TYPES}
"""What the library is told of a judge that failed: it keeps an error's type and text alone."""


def keep_whole_traces() -> None:
    """Have recorded errors tell what began them.

    The library wraps what a task's code raises in an error that it does not raise, or whose cause it overwrites.
    """
    stock_init, stock_record = vf.TaskError.__init__, vf.Trace.record_error

    def init(self: Any, *args: object) -> None:
        stock_init(self, *args)
        self.__context__ = sys.exc_info()[1]

    def record_error(self: Any, error: Exception) -> None:
        stock_record(self, error)
        if self.errors[-1].traceback:
            self.errors[-1].traceback = trace_text(error)

    vf.TaskError.__init__, vf.Trace.record_error = init, record_error


def take_numbers() -> None:
    """Have traces take numbers for rewards: the library makes one of a text that looks like one."""
    stock = vf.Trace.record_reward

    def record_reward(self: Any, name: str, value: Any, weight: float = 1.0) -> None:
        try:
            number = number_of(value)
        except NotANumberError as error:
            raise TypeError(f"reward {name!r} is {error}") from error
        stock(self, name, number, weight)

    vf.Trace.record_reward = record_reward


def mark_scoring() -> None:
    """Have what a task's rewards and judges ask pass the gate of judges, and errors say that it began there."""
    stock = vf.Task.score

    @functools.wraps(stock)
    async def score(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            with judges.scoring(), engine_access.at("the task's rewards"):
                await stock(self, *args, **kwargs)
        except vf.TaskError as error:
            if not (kind := judges.failure_type(error)):
                raise
            raise _JUDGE_ERRORS[kind](judges.with_remedy(kind, str(error))) from error
        except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            if judges.is_being_cancelled(error):
                raise
            raise vf.TaskError(f"the task's rewards raised {type(error).__name__}: {error}") from error

    vf.Task.score = score


def refuse_other_parts_of_chats() -> None:
    """Have the train client refuse content parts that are not text; the relaying one takes them."""
    stock = TrainClient.get_response

    async def get_response(
        self: Any, dialect: Any, body: dict[str, Any], sampling: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if kind := other_part(body.get("messages") or ()):
            raise _NotTextError(refusal(kind))
        return await stock(self, dialect, body, agents.ends_of(body, sampling), *args, **kwargs)

    TrainClient.get_response = get_response
