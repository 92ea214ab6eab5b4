"""Chat templates as the foreign code that they are."""

from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a chat template, which is foreign code, raises for a conversation that it does not know.

Its own errors, and those of the operations in it: text joined with a list of parts, a tool that is no schema.
"""

_DEFAULT = "default"


def why_no_template(tokenizer: Any) -> str | None:
    """What a tokenizer has instead of a chat template for any conversation; None if it has one.

    What a template refuses of a conversation is its own affair; one that is no Jinja refuses all of them.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return "no chat template"
    if isinstance(template, dict) and _DEFAULT not in template:
        return f"no chat template for conversations without tools (it has {', '.join(sorted(template))})"
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True)
    except TemplateSyntaxError as error:
        return f"a chat template that cannot be read (line {error.lineno}: {error.message})"
    except TEMPLATE_ERRORS:
        return None
    return None
