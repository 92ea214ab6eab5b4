"""Replies of models, well formed and not, at least 60 for each parser, and what is made of them.

`parser_replies.json`, beside this file, is the table: replies with what vLLM 0.32 says of them and, where ours say
something else, what, and which of `REASONS` that has. The default suite holds ours to it, the vLLM lane vLLM's own.

Run in the interpreter that has vLLM, `parser_replies.py TOKENIZER OUT` writes what vLLM's parsers say, and what they
say once its server has our plugin.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from millrace_testing.inference.parser_cases import Case, vllm_said

TABLE = Path(__file__).with_name("parser_replies.json")

REASONS = {
    "thought of": "a call that stands in a thought is not made: vLLM ends the thought with it, or knows of no thought",
    "mention": "a tag that is only mentioned is text: vLLM takes it for the beginning of a call, or drops it",
    "inner tag": "`<think>` in a thought, `</think>` behind it and what stands before them stay: vLLM drops them",
    "own tags": "a value may hold the tags that close it: vLLM ends the value, or the call, at the first of them",
    "half a call": "a call that is not whole, or of another format, is text: vLLM drops it, or makes what there is",
    "not JSON": "what JSON does not have (NaN, names given twice, lone surrogates) is text: vLLM hands it on",
    "type": "a value that its schema's type cannot hold is text: vLLM takes any JSON that it is",
    "unknown": "a parameter that the tool does not have, in a value that nothing closed, is part of that value",
    "side by side": "objects that follow each other at once are calls: vLLM takes them for text",
    "space": "a parameter's name is what stands between `=` and `>`, and space before `<think>` is no thought",
}


class Reply(NamedTuple):
    """A row of the table."""

    tool_calls: str
    reasoning: str | None
    text: str
    vllm: Any
    """Reasoning, content without the whitespace around it, and calls with their arguments decoded."""
    ours: Any = None
    why: str = ""
    template_kwargs: dict[str, Any] = {}  # noqa: RUF012 - of a tuple that nobody changes

    @property
    def expected(self) -> Any:
        """Return what our parser has to return for it."""
        return self.ours if self.why else self.vllm


def replies() -> list[Reply]:
    """Return the table."""
    return [Reply(**row) for row in json.loads(TABLE.read_text())]


def said(reply: Reply, tokenizer: Any) -> Any:
    """Return what vLLM's parser returns for the reply, in the form of the table."""
    case = Case(reply.tool_calls, reply.reasoning, reply.text, (None, None, []), reply.template_kwargs)
    return json.loads(json.dumps(vllm_said(case, tokenizer)))


def _main() -> None:
    from transformers import AutoTokenizer

    from millrace.inference.vllm.server.parsers import install

    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    stock = [said(reply, tokenizer) for reply in replies()]
    install()
    Path(sys.argv[2]).write_text(json.dumps([stock, [said(reply, tokenizer) for reply in replies()]]))


if __name__ == "__main__":
    _main()
