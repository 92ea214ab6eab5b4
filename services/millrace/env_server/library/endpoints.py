"""Reading of endpoints' answers: errors about prompts that are too long, and arguments of tool calls."""

import contextlib
import functools
import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError

_MAX_CHARS = 240
_MAX_ROLLOUTS = 8192  # as many as `SpanLog` remembers, for the same reason


class TooLongLog:
    """Messages of engines about prompts that are too long, by rollout, until the adapter takes them."""

    def __init__(self) -> None:
        """Make a log without messages."""
        self._messages: OrderedDict[str, str] = OrderedDict()

    def note(self, rollout_id: str, message: str) -> None:
        """Keep the message with which an engine refused a prompt of that rollout as too long, in place of an earlier
        one.

        Beyond 8192 rollouts the oldest message is dropped.
        """
        self._messages[rollout_id] = message
        while len(self._messages) > _MAX_ROLLOUTS:
            self._messages.popitem(last=False)

    def take(self, rollout_id: str) -> str:
        """Return the message about a prompt of one rollout that was too long, and remove it; "" if there is none."""
        return self._messages.pop(rollout_id, "")


# One per process: a worker hosts one environment.
TOO_LONG = TooLongLog()


def watch_v1() -> None:
    """Wrap methods of the library's v1 clients so that refusals of prompts that are too long are noted in TOO_LONG.

    A second call does nothing.
    """
    # Imported here: the v0 API, and releases that have it alone, do without.
    from verifiers.v1.clients.eval import EvalClient
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.errors import ProviderError

    for client in (TrainClient, EvalClient):
        for name in vars(client).keys() & {"get_response", "relay"}:
            stock = getattr(client, name)
            if not hasattr(stock, "_is_noting"):
                setattr(client, name, _noting(stock, ProviderError))


def _noting(stock: Callable[..., Any], error_class: type[Exception]) -> Callable[..., Any]:
    """Return a method that calls `stock` and notes an error of `error_class` about a prompt that is too long in
    TOO_LONG.
    """

    @functools.wraps(stock)
    async def call(*args: Any, **kwargs: Any) -> Any:
        """Call the library's method, and note the text of a refusal of a prompt that is too long."""
        try:
            return await stock(*args, **kwargs)
        except error_class as error:
            if (session_id := kwargs.get("session_id")) and type(error).__name__ == "OverlongPromptError":
                TOO_LONG.note(str(session_id), str(error))
            raise

    call._is_noting = True  # type: ignore[attr-defined]
    return call


def explain(message: str) -> str:
    """Return the first part of an engine's message about a prompt that is too long, shortened; a general text for "".

    The remedy depends on whether the rollout is for training or evaluation, and is added by the caller.
    """
    numbers = message.partition(" Please ")[0].rstrip(" .")  # what follows is for the author of the request
    return numbers[:_MAX_CHARS] or "the prompt does not fit the model's context"


def explain_trace(episode: Any, error: Any | None) -> str:
    """Return why the prompt of a v1 episode was refused as too long, by the notes in TOO_LONG, which are removed.

    Without a note it is by `error`, the episode's, which may be None.
    """
    message = next(filter(None, [TOO_LONG.take(trace.id) for trace in episode.traces]), "")
    return explain(message or (str(error.message) if error is not None else ""))


def sentence_of(body: bytes) -> str:
    """Return the error message in the body of an engine's answer, of OpenAI's form or an older one; "" if there is
    none.
    """
    with contextlib.suppress(CorruptObjectError):
        answer = decode_object(body, what="an engine's answer", reason="ENGINE_ANSWER_INVALID")
        error = answer.get("error", answer)
        message = error.get("message") if isinstance(error, dict) else error
        return message if isinstance(message, str) else ""
    return ""


# The arguments of a tool call: OpenAI's API has them as a text of JSON, some endpoints give the object itself.


def arguments_text(arguments: Any) -> str:
    """Return the arguments of a tool call as JSON text: a text as it is, "{}" for None or "", else the JSON of the
    object.
    """
    if arguments is None or arguments == "":
        return "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
