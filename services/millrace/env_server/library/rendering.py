"""Hops to a thread that `verifiers` v1 makes in every turn to tokenize, left out while they cost more than they save.

A hop and its way back cost more than a short prompt does; a long one would hold up every other rollout of the worker.
So a renderer that was quick of late renders at once, and one that was not does so in a thread, as the library has it:
the longest time counts, and is forgotten by a tenth with each render.

Members of a group begin with the same messages: what was rendered of late is kept, and each gets lists of its own.
"""

import copy
import functools
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from verifiers.v1.clients.train import RendererSlot

T = TypeVar("T")

QUICK_S = 0.002
"""CPU seconds; a thousand tokens take about half of it."""
_TOOK, _FORGOTTEN = "millrace_took_s", 0.9


KEPT_TOKENS = 1 << 19
"""Per renderer, at most 50 MB; a renderer has one tokenizer and one template, so messages and tools are the key."""
_TOKENS_OF_AN_ENTRY = 64
"""What key and objects of a prompt weigh, as tokens do."""


class KeptPrompts:
    """The `render` of one renderer, whose prompts of late it gives again. Called by one thread at a time."""

    def __init__(self, render: Callable[..., Any]) -> None:
        self._render = render
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        self.num_tokens = 0
        self.was_known = False
        """Whether the last prompt was there already."""

    def __call__(self, messages: Any, **options: Any) -> Any:
        """As the renderer's own."""
        try:
            # In their order, which templates may write. The text itself may be longer than what is rendered of it.
            key = hashlib.sha256(orjson.dumps([messages, options])).digest()
        except TypeError:  # what is no plain data is rendered each time
            return self._render(messages, **options)
        found = self._kept.get(key)
        self.was_known = found is not None
        if found is None:
            found = self._render(messages, **options)
            if found.multi_modal_data is not None:
                return found
            self._kept[key] = found
            self.num_tokens += len(found.token_ids) + _TOKENS_OF_AN_ENTRY
            while self.num_tokens > KEPT_TOKENS:
                self.num_tokens -= len(self._kept.popitem(last=False)[1].token_ids) + _TOKENS_OF_AN_ENTRY
        else:
            self._kept.move_to_end(key)
        made = copy.copy(found)
        vars(made).update({name: list(value) for name, value in vars(found).items() if isinstance(value, list)})
        return made


def _timed(slot: RendererSlot, render: Callable[[], T]) -> T:
    kept: Any = slot.renderer.render
    kept.was_known = False
    began = time.thread_time()
    try:
        return render()
    finally:
        if not kept.was_known:  # which says nothing of the next one
            setattr(slot, _TOOK, max(time.thread_time() - began, _FORGOTTEN * getattr(slot, _TOOK, 0.0)))


def install() -> None:
    """Have the library's renderers render like that. Idempotent."""
    stock: Any = getattr(RendererSlot.run, "__wrapped__", RendererSlot.run)

    @functools.wraps(stock)
    async def run(self: RendererSlot, fn: Callable[[], T]) -> T:
        renderer: Any = self.renderer
        if not isinstance(renderer.render, KeptPrompts):
            renderer.render = KeptPrompts(renderer.render)
        if getattr(self, _TOOK, 0.0) <= QUICK_S and self.lock.acquire(blocking=False):
            try:
                return _timed(self, fn)
            finally:
                self.lock.release()
        return await stock(self, lambda: _timed(self, fn))

    RendererSlot.run = run
