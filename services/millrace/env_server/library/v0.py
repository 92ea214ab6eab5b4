"""The parts of `verifiers` that the v0 adapter uses, wherever this release has them.

| release | where | what is missing there |
|---|---|---|
| 0.3.1 | `verifiers.legacy` | nothing |
| 0.1.14 to 0.3.0 | `verifiers` | the renderer client, or that it takes a typed config; then the engine tokenizes |
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING or importlib.util.find_spec("verifiers.legacy") is not None:
    from verifiers.legacy.clients import Client, OpenAIChatCompletionsClient, OpenAICompletionsClient, resolve_client
    from verifiers.legacy.types import (
        ClientConfig,
        Response,
        ResponseMessage,
        ResponseTokens,
        TimeSpan,
        Tool,
        ToolCall,
        Usage,
    )
    from verifiers.legacy.utils import response_utils
    from verifiers.legacy.utils.error_utils import ErrorChain
    from verifiers.legacy.utils.message_utils import normalize_messages
    from verifiers.legacy.utils.save_utils import state_to_output

    RENDERER_CLIENT = "verifiers.legacy.clients.renderer_client"
else:
    from verifiers.clients import Client, OpenAIChatCompletionsClient, OpenAICompletionsClient, resolve_client
    from verifiers.types import (
        ClientConfig,
        Response,
        ResponseMessage,
        ResponseTokens,
        TimeSpan,
        Tool,
        ToolCall,
        Usage,
    )
    from verifiers.utils import response_utils
    from verifiers.utils.error_utils import ErrorChain
    from verifiers.utils.message_utils import normalize_messages
    from verifiers.utils.save_utils import state_to_output

    RENDERER_CLIENT = "verifiers.clients.renderer_client"

HAS_RENDERERS = "renderer_config" in ClientConfig.model_fields and importlib.util.find_spec("renderers") is not None
"""Whether turns can be tokenized here, and not by the engine."""

__all__ = [
    "HAS_RENDERERS",
    "RENDERER_CLIENT",
    "Client",
    "ClientConfig",
    "ErrorChain",
    "OpenAIChatCompletionsClient",
    "OpenAICompletionsClient",
    "Response",
    "ResponseMessage",
    "ResponseTokens",
    "TimeSpan",
    "Tool",
    "ToolCall",
    "Usage",
    "normalize_messages",
    "resolve_client",
    "response_utils",
    "state_to_output",
]
