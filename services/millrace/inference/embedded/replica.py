"""The embedded engine's replica: engine, HTTP API, PolicyService and registration in one event loop."""

import asyncio
import logging
import sys
from pathlib import Path

from millrace.inference.embedded import loader
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.http.parsers import DEFAULT_TOOL_CALL_PARSER, ChatParsers
from millrace.inference.http.server import HttpApi, start_http
from millrace.inference.model_files import ModelSlot, has_tokenizer
from millrace.inference.service import ReplicaParts
from millrace.inference.settings import InferenceSettings, http_address
from millrace.models.vocabulary import check_tokenizer
from millrace.telemetry.settings import Settings, join_address, parse_address

logger = logging.getLogger(__name__)

# The engine's thread takes the interpreter lock between two torch operators; with Python's default of 5 ms it would
# wait that long, several times per token, whenever the HTTP API has work.
_SWITCH_INTERVAL_S = 0.0005


class EmbeddedReplica:
    """Makes the parts of a replica with the embedded engine; `run` serves until SIGTERM, SIGINT or `stopping`."""

    def __init__(self, settings: Settings, own: InferenceSettings, *, stopping: asyncio.Event | None = None) -> None:
        """Make the engine and the replica's parts; nothing is served before `run`. `stopping` ends it as SIGTERM
        does.
        """
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._settings = settings
        self._own = own
        self._engine = EmbeddedEngine(
            max_num_seqs=own.max_num_seqs,
            max_model_len=own.max_model_len,
            kv_bytes=own.kv_cache_bytes,
            num_threads=own.num_threads,
            returns_experts=own.return_routed_experts,
        )
        slot = ModelSlot()
        names = () if own.model_name is None else (own.model_name,)
        self.parts = ReplicaParts(settings, self._engine, slot, stopping=stopping or asyncio.Event(), extra_names=names)
        self._api = HttpApi(self._engine, slot, parsers=_parsers(own))

    async def run(self) -> None:
        """Serve the HTTP API and stay registered until SIGTERM, SIGINT or `stopping`, then let requests finish.

        A fixed model, if one is configured, is loaded before registration.
        """
        host, port = parse_address(self._settings.require("http_listen"))
        server = await start_http(self._api, host, port)
        logger.info("listening for HTTP", extra={"address": join_address(host, server.port)})
        try:
            if (model := self._own.model_dir) is not None:
                await asyncio.to_thread(_check_tokenizer, model, needs_template=self._own.needs_chat_template)
                await self.parts.updater.serve_fixed(model)
            await self.parts.run(http_address(host, server.port), drain=self._api.drain, warm_up=loader.warm_up)
        finally:
            await server.stop()
            await self._engine.close()


def _check_tokenizer(model: Path, *, needs_template: bool) -> None:
    """Raise the error of `check_tokenizer` if the model's tokenizer, or its chat template where needed, is wrong.

    A model without a tokenizer passes where no chat template is needed.
    """
    if needs_template or has_tokenizer(model):
        check_tokenizer(model, model=model, needs_template=needs_template)


def _parsers(own: InferenceSettings) -> ChatParsers:
    """Return the parsers of tool calls and reasoning that the settings name."""
    return ChatParsers(
        tool_calls=own.tool_call_parser or DEFAULT_TOOL_CALL_PARSER,
        reasoning=own.reasoning_parser,
        has_auto_tool_choice=own.enable_auto_tool_choice is not False,
    )
