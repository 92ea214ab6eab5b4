"""An in-process v1 harness: one model call per segment, through the interception endpoint.

The stock harnesses start a Python subprocess per segment (about 1.5 CPU-seconds per rollout). The interception is the
contract, not the process, so a coroutine does. It offers no tools: a taskset with tool servers is refused by
`verifiers` with its reason, unless the environment's args name another harness.
"""

import asyncio
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

from millrace.env_server.adapters.text_only import with_plain_text

# A plugin id is looked up as a top-level module; `register` makes this module answer to it.
HARNESS_ID = "millrace_inprocess"
_SHOWN_CHARS = 500
# Backstop only: a rollout's deadline cancels its request long before.
_TIMEOUT = httpx.Timeout(6 * 3600.0, connect=5.0)

_clients: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}


def _client() -> httpx.AsyncClient:
    """The event loop's client; it talks to the interception server in this process only."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        _clients[loop] = httpx.AsyncClient(timeout=_TIMEOUT, limits=limits, trust_env=False)
    return _clients[loop]


class InprocessHarnessConfig(vf.HarnessConfig):
    """Nothing to configure."""


class InprocessHarness(vf.Harness[InprocessHarnessConfig]):
    """Sends the conversation once and stops; the rollout's user, if it has one, resumes it."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
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
        """Make one model call."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [with_plain_text(message_to_wire(message)) for message in prompt or ()]
        reply = await _client().post(
            f"{endpoint}/chat/completions",
            headers={"Authorization": f"Bearer {secret}"},
            json={"model": ctx.model, "messages": messages},
        )
        if reply.status_code != 200:
            detail = f"{reply.status_code} {reply.text[:_SHOWN_CHARS]}"
            return ProgramResult(exit_code=1, stdout="", stderr=detail)
        return ProgramResult(exit_code=0, stdout="", stderr="")


def register() -> str:
    """Make the harness loadable by its id, which is returned."""
    import sys

    sys.modules[HARNESS_ID] = sys.modules[__name__]
    return HARNESS_ID


__all__ = ["InprocessHarness"]
