"""An in-process v1 harness: model calls through the interception endpoint, and calls of tools in between.

The stock harnesses start a Python subprocess per segment (about 1.5 CPU-seconds per rollout). The interception is the
contract, not the process, so a coroutine does, which asks it without a connection (`library.interception`). The tools
are those of the taskset's MCP servers, which the library starts; the policy sees them under the names that the
library's own `null` harness gives them.
"""

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import verifiers.v1 as vf
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

from millrace.decoding import decode_object
from millrace.env_server import engine_access
from millrace.env_server.adapters.text_only import other_part, with_plain_text
from millrace.env_server.library import v1
from millrace.env_server.library.endpoints import arguments_text
from millrace.env_server.library.v1 import mcp_field
from millrace.errors import CorruptObjectError

# A plugin id is looked up as a top-level module; `register` makes this module answer to it.
HARNESS_ID = "millrace_inprocess"
_SHOWN_CHARS = 500


class Tools:
    """What the MCP servers of a rollout offer."""

    def __init__(self) -> None:
        self.definitions: list[dict[str, Any]] = []
        """As OpenAI's API has them."""
        self._owners: dict[str, tuple[ClientSession, str]] = {}

    async def add(self, server: str, session: ClientSession) -> None:
        """Add a server's tools to those offered, as `SERVER_TOOL`. Raises ValueError if a name is taken."""
        await session.initialize()
        for tool in (await session.list_tools()).tools:
            name = f"{server}_{tool.name}" if server else tool.name
            if name in self._owners:
                raise ValueError(f"two tool servers have a tool {name!r}; give one of them another TOOL_PREFIX")
            self._owners[name] = (session, tool.name)
            function = {
                "name": name,
                "description": tool.description or "",
                "parameters": mcp_field(tool, "inputSchema"),
            }
            self.definitions.append({"type": "function", "function": function})

    async def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Make a tool call of the policy's and return the message with its result.

        For an unknown tool, or arguments that are no JSON object, the message has the error. Errors of the server are
        raised.
        """
        function = call["function"]
        return {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": await self._result(str(function.get("name")), arguments_text(function.get("arguments"))),
        }

    async def _result(self, name: str, arguments: str) -> str | list[dict[str, Any]]:
        if name not in self._owners:
            return f"error: there is no tool {name!r}"
        try:
            values = decode_object(arguments, what=f"arguments of {name}", reason="TOOL_ARGUMENTS_INVALID")
        except CorruptObjectError as error:
            return f"error: the arguments must be a JSON object: {error}"
        session, tool = self._owners[name]
        with engine_access.at(f"tool {name!r}"):
            blocks = (await session.call_tool(tool, values)).content
        parts: list[dict[str, Any]] = [_part(block) for block in blocks]
        return "\n".join(part["text"] for part in parts) if not other_part([{"content": parts}]) else parts


def _part(block: Any) -> dict[str, Any]:
    if block.type == "image":
        return {"type": "image_url", "image_url": {"url": f"data:{mcp_field(block, 'mimeType')};base64,{block.data}"}}
    return {"type": "text", "text": block.text if block.type == "text" else str(block)}


@contextlib.asynccontextmanager
async def opened_tools(urls: Mapping[str, str], *, timeout_s: float) -> AsyncIterator[Tools]:
    """Connect to MCP servers, given by name, and yield their tools until the block ends.

    Each HTTP request to a server may take `timeout_s`.
    """
    tools = Tools()
    async with contextlib.AsyncExitStack() as stack:
        for server, url in urls.items():
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=timeout_s, follow_redirects=True))
            read, write, *_ = await stack.enter_async_context(streamable_http_client(url, http_client=client))
            await tools.add(server, await stack.enter_async_context(ClientSession(read, write)))
        yield tools


class InprocessHarnessConfig(vf.HarnessConfig):
    """Nothing to configure."""


class InprocessHarness(vf.Harness[InprocessHarnessConfig]):
    """Sends the conversation until the policy calls no tool; the rollout's user, if it has one, resumes it."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = v1.GATES_CALLS
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(  # type: ignore[override]
        self,
        ctx: vf.ModelContext,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        **kwargs: Any,
    ) -> ProgramResult:
        """Call the model, and the tools that it asks for, until a reply calls no tool.

        Returns exit code 1 if a model call is not answered with 200 or the library stops the rollout, with the reason
        in `stderr`; else 0.
        """
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [with_plain_text(message_to_wire(message)) for message in prompt or ()]
        async with opened_tools(mcp_urls, timeout_s=self.config.tool_timeout) as tools:
            body: dict[str, Any] = {"model": ctx.model, "messages": messages}
            if tools.definitions:
                body["tools"] = tools.definitions
            while True:
                reply = await v1.ask(secret, body)
                if reply.status != 200:
                    detail = f"{reply.status} {reply.text[:_SHOWN_CHARS]}"
                    return ProgramResult(exit_code=1, stdout="", stderr=detail)
                message = json.loads(reply.body)["choices"][0]["message"]
                calls = message.get("tool_calls") if tools.definitions else None
                if not calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                messages.append(message)
                for call in calls:
                    try:
                        denied = await v1.verdict(secret, call)
                    except v1.StoppedError as error:
                        return ProgramResult(exit_code=1, stdout="", stderr=str(error))
                    messages.append(dict(denied) if denied else await tools.answer(call))


def register() -> str:
    """Make this module what the library loads for HARNESS_ID, and return that id."""
    # Found under the first name the library does not look for it on the disk, which it would in every rollout.
    for name in (f"verifiers.v1.harnesses.{HARNESS_ID}", HARNESS_ID):
        sys.modules[name] = sys.modules[__name__]
    return HARNESS_ID


__all__ = ["InprocessHarness"]
