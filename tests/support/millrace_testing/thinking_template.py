"""A chat template that rewrites history, as those of thinking models do: earlier turns lose their `<think>` part."""

from collections.abc import Callable, Sequence
from typing import Any

import jinja2

_TURN = "<{{ message.role }}>{{ %s }}</s>"
_STRIPPED = "message.content.split('</think>')[-1]"
_TEMPLATE = "{%% for message in messages %%}%s{%% endfor %%}<assistant>"
END = "</s>"

KEEPS = _TEMPLATE % (_TURN % "message.content")
STRIPS = _TEMPLATE % (_TURN % _STRIPPED)


def prompt_encoder(template: str) -> Callable[[Sequence[Any]], list[int]]:
    """Return a function from messages to the prompt's token ids: one token per byte of the rendered template."""
    render = jinja2.Environment(autoescape=False).from_string(template).render
    return lambda messages: list(render(messages=messages).encode())
