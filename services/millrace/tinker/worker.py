"""The processes that `millrace tinker` starts: a trainer, which executes the requests of models, and a sampler.

    server ──▶ {"tenant", "model"}               a model may have requests        (trainer)
           ──▶ {"tenant", "sampler", "seq_id"}   a request for samples is stored  (sampler)
    worker ──▶ {"kind": "ready" | "begin" | "end" | "done" | "broken", …}

Messages are hints: every fact is an object in the store. A process ends with its server.
"""

import asyncio
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from millrace.decoding import Fields, decode_object
from millrace.processes.channel import ParentLink
from millrace.storage import ObjectStore, open_store
from millrace.telemetry.logging import setup
from millrace.telemetry.settings import Settings
from millrace.telemetry.startup import without_gc
from millrace.tinker.workers import MAX_FRAME_BYTES, TRAINER

logger = logging.getLogger(__name__)


def main() -> None:
    """Work for the parent process until it is gone."""
    parent = ParentLink()
    order = Fields(parent.order, what="the order")
    settings = Settings.from_env(os.environ, required=["store_url"])
    setup("tinker", level=settings.log_level, json_lines=settings.log_json)
    store = open_store(settings.require("store_url"))
    run = _train if order.text("role") == TRAINER else _sample
    run(parent, order, settings.prefix, store)


def _listen(parent: ParentLink, on_hint: Callable[[Fields], None]) -> None:
    """Call `on_hint` with every hint of the parent, in a thread of its own; end this process with the parent."""

    def listen() -> None:
        while (data := parent.receive(most=MAX_FRAME_BYTES)) is not None:
            on_hint(Fields(decode_object(data, what="a hint", reason="FRAME_UNREADABLE")))
        os._exit(0)  # nothing here is worth an orderly end: every fact is stored

    threading.Thread(target=listen, name="parent", daemon=True).start()


def _tell(parent: ParentLink, message: Mapping[str, Any]) -> None:
    """Send the parent a message; if it is gone this process ends."""
    try:
        parent.send(json.dumps(message).encode())
    except OSError:
        os._exit(0)


def _train(parent: ParentLink, order: Fields, prefix: str, store: ObjectStore) -> None:
    """Execute the requests of models, for ever."""
    with without_gc():
        import torch

        from millrace.tinker.executor import VerbExecutor
        from millrace.tinker.names import ModelName
        from millrace.tinker.training import SharedBase, base_digest

    hints: queue.SimpleQueue[ModelName] = queue.SimpleQueue()
    _listen(parent, lambda hint: hints.put(ModelName.parse(prefix, hint.text("tenant"), hint.text("model"))))
    torch.set_num_threads(order.integer("num_threads", least=1))
    directory = Path(order.text("model"))
    base = SharedBase(directory, max_tokens=order.integer("max_tokens") if order.has("max_tokens") else None)
    executor = VerbExecutor(
        store,
        base,
        base_digest=base_digest(directory),
        note=lambda message: _tell(parent, message),
        snapshot_verbs=order.integer("snapshot_verbs", least=1),
    )
    _tell(parent, {"kind": "ready", "max_tokens": base.max_tokens})
    while True:
        pause_s = executor.pause_s()
        try:
            executor.look(hints.get(timeout=pause_s))
            # All that came meanwhile: models take turns.
            while not hints.empty():
                executor.look(hints.get())
        except queue.Empty:
            pass
        executor.work()


def _sample(parent: ParentLink, order: Fields, prefix: str, store: ObjectStore) -> None:
    """Answer requests for samples, for ever."""
    with without_gc():
        from millrace.inference.embedded.engine import EmbeddedEngine
        from millrace.tinker.names import SamplerName
        from millrace.tinker.sampling import Sampling

    async def run() -> None:
        engine = EmbeddedEngine(
            max_model_len=order.integer("max_tokens") if order.has("max_tokens") else None,
            num_threads=order.integer("num_threads", least=1),
        )
        loop = asyncio.get_running_loop()
        sampling = Sampling(
            store,
            engine,
            done=lambda sampler, seq_id: _tell(
                parent,
                {"kind": "done", "tenant": sampler.home.tenant, "sampler": sampler.id, "seq_id": seq_id},
            ),
            turn=lambda sampler, begins: _tell(
                parent,
                {"kind": "begin" if begins else "end", "tenant": sampler.home.tenant, "sampler": sampler.id},
            ),
        )

        def hinted(hint: Fields) -> None:
            name = SamplerName.parse(prefix, hint.text("tenant"), hint.text("sampler"))
            loop.call_soon_threadsafe(sampling.look, name, hint.integer("seq_id"))

        _listen(parent, hinted)
        await sampling.load(Path(order.text("model")))
        _tell(parent, {"kind": "ready", "max_tokens": engine.status().max_model_len})
        await sampling.run()

    asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
