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
_THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"

NAMES_ONLY = "tools | map(attribute='function.name') | join(' ')"
"""For models that read a token per byte."""


def hermes(*, shows: str = "tools | tojson", keeps_thoughts: bool = True) -> str:
    """Calls as JSON; `shows` is how the tools stand in the prompt."""
    return _BEGIN.replace("%s", shows) + _HEAD % (_THOUGHT if keeps_thoughts else "") + _JSON + _END


def xml() -> str:
    """Calls as tags."""
    return _BEGIN.replace("%s", "tools | tojson") + _HEAD % _THOUGHT + _XML + _END
