"""Chat templates with tools, as models with these formats have them: a call is rendered as the model is to write it."""

_BEGIN = "{% if tools %}<|im_start|>system\n{{ %s }}<|im_end|>\n{% endif %}"
_HEAD = "{%% for m in messages %%}<|im_start|>{{ m.role }}\n%s{{ m.content }}"
_END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_JSON = (
    '{% for c in m.tool_calls or [] %}{{ "\n" if m.content or not loop.first }}<tool_call>\n{"name": '
    '{{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
_XML = (
    '{% for c in m.tool_calls or [] %}{{ "\n" if m.content or not loop.first }}<tool_call>\n'
    "<function={{ c.function.name }}>\n{% for key, value in c.function.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)
TOOLS_BEGIN = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_END = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
_RESULT = (
    "{% if m.role == 'tool' %}{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}{% else %}"
)
_THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"

NAMES_ONLY = "tools | map(attribute='function.name') | join(' ')"
"""For models that read a token per byte."""


def hermes(*, shows: str = "tools | tojson", keeps_thoughts: bool = True) -> str:
    """Return a template that renders calls as JSON; `shows` is the expression that renders the tools in the prompt."""
    return _BEGIN.replace("%s", shows) + _HEAD % (_THOUGHT if keeps_thoughts else "") + _JSON + _END


QWEN3_SYMBOLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""What is one token each for a Qwen3."""


def qwen3() -> str:
    """Return Qwen3's tool template without thoughts, and without a system message beside tools.

    What is behind a tag begins with no line break, which `transformers` would take away.
    """
    offered = (
        TOOLS_BEGIN + "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '\n' }}" + TOOLS_END.lstrip()
    )
    begin = "{% if tools %}<|im_start|>system\n" + offered + "<|im_end|>\n{% endif %}"
    message = "<|im_start|>{{ m.role }}\n{{ m.content }}" + _JSON + "<|im_end|>\n"
    return begin + "{% for m in messages %}" + _RESULT + message + "{% endif %}" + _END.removeprefix("<|im_end|>\n")


def xml() -> str:
    """Return a template that renders calls as tags."""
    return _BEGIN.replace("%s", "tools | tojson") + _HEAD % _THOUGHT + _XML + _END
