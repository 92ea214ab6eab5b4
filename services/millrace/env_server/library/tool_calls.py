"""The arguments of a tool call: OpenAI's API has them as a text of JSON, some endpoints give the object itself."""

import json
from typing import Any


def arguments_text(arguments: Any) -> str:
    """The arguments as JSON; none are an empty object."""
    if arguments is None or arguments == "":
        return "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
