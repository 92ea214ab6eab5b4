"""Parses vLLM's chat completions with our parsers, if we have those whose names its server was started with.

So a reply means the same to an environment whichever engine wrote it: vLLM 0.32 itself makes calls that are only
thought of, and drops what is only mentioned. Streams keep vLLM's own parsers, which read piece by piece, and so do
requests that name a function or require one, whose output is constrained.
"""

from collections.abc import Sequence
from typing import Any

from millrace.inference.http.parsers import (
    DEFAULT_TOOL_CALL_PARSER,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ChatParsers,
    ParsedCompletion,
)


def install() -> None:
    """Have vLLM use our parsers in this process."""
    from vllm.entrypoints.generate.base.protocol import FunctionCall  # pyright: ignore[reportMissingImports]
    from vllm.parser import ParserManager  # pyright: ignore[reportMissingImports]

    use_our_parsers(ParserManager, call_type=FunctionCall)


def use_our_parsers(manager: Any, *, call_type: Any) -> None:
    """Replace `get_parser` of vLLM's ParserManager, `manager`, so that it gives our parsers, where we have the named
    ones.

    `call_type` is vLLM's `FunctionCall`.
    """
    compose = manager.get_parser

    def get_parser(
        tool_parser_name: str | None = None,
        reasoning_parser_name: str | None = None,
        enable_auto_tools: bool = False,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Return vLLM's parser for these names, or one that parses whole completions with ours if we have both.

        The parser of tool calls counts only with `enable_auto_tools`. None if vLLM has no parser for the names.
        """
        made = compose(tool_parser_name, reasoning_parser_name, enable_auto_tools, *args, **options)
        tools = tool_parser_name if enable_auto_tools else None
        are_ours = (not tools or tools in TOOL_CALL_PARSERS) and (
            not reasoning_parser_name or reasoning_parser_name in REASONING_PARSERS
        )
        if made is None or not are_ours or options.get("is_harmony"):
            return made
        return _with_ours(made, tools or None, reasoning_parser_name or None, call_type)

    manager.get_parser = staticmethod(get_parser)


def _with_ours(composed: Any, tool_calls: str | None, reasoning: str | None, call_type: Any) -> Any:
    """Return a class derived from `composed`, vLLM's parser, which parses whole chat completions with ours.

    `tool_calls` and `reasoning` are the names of the parsers; None is none.
    """
    ours = ChatParsers(reasoning=reasoning, tool_calls=tool_calls or DEFAULT_TOOL_CALL_PARSER)

    class OurParser(composed):
        """Parses whole chat completions with Millrace's parsers, and streams with vLLM's."""

        def parse(
            self,
            model_output: str,
            request: Any,
            enable_auto_tools: bool = False,
            model_output_token_ids: Sequence[int] = (),
        ) -> tuple[str | None, str | None, list[Any] | None]:
            """Return (reasoning, content, tool calls) of a completion, by our parsers.

            vLLM's own are used if the request is no chat, or requires a tool. Calls are looked for only with
            `enable_auto_tools`.
            """
            choice = getattr(request, "tool_choice", None)
            if not hasattr(request, "messages") or choice not in (None, "auto", "none"):
                return super().parse(model_output, request, enable_auto_tools, model_output_token_ids)
            is_auto = tool_calls is not None and enable_auto_tools and choice != "none"
            tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()] if is_auto else []
            kwargs = request.chat_template_kwargs or {}
            parsed = ours.parse_completion(model_output, tools=tools, template_kwargs=kwargs)
            parsed = parsed or ParsedCompletion(content=model_output or None)
            self._initialize_history_tool_call_cnt(request)  # ids of calls may count those of the conversation
            calls = [
                call_type(id=self._make_tool_call_id(call.name), name=call.name, arguments=call.arguments)
                for call in parsed.calls
            ]
            return parsed.reasoning, parsed.content, calls

    return OurParser
