"""Long work of Hugging Face's libraries, which tell how far it is by a progress bar only: `tqdm`.

Nothing here imports them: who loads a model has done so.
"""

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from millrace.telemetry.progress import LongWork, count_rows

_LOADING = threading.Lock()
"""The hook of transformers is one for all threads."""


def counting_bar(work: LongWork) -> type:
    """A class for `tqdm_class` of `huggingface_hub.snapshot_download`: its bar of bytes counts for `work`."""
    from huggingface_hub.utils import tqdm

    class CountingBar(tqdm):
        """Draws nothing. Of its bars, that of the bytes that are written is the one that counts."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts = options.get("name") == "huggingface_hub.snapshot_download"
            self._at = options.get("initial") or 0
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            self._at += int(n or 0)
            self.refresh()

        def refresh(self, *args: Any, **options: Any) -> None:
            if self._counts:
                work.at(self._at, total=int(self.total or 0))

    return CountingBar


@contextlib.contextmanager
def loading_counts(work: LongWork) -> Iterator[None]:
    """Tensors that `from_pretrained` of transformers loads in this block, and in this thread, count for `work`."""
    library: Any = importlib.import_module("transformers.utils.logging")
    mine = threading.get_ident()

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if threading.get_ident() != mine or not args or "Loading" not in str(options.get("desc", "")):
            return factory(*args, **options)
        return count_rows(work, args[0], total=len(args[0]))

    with _LOADING:
        before = library.set_tqdm_hook(hook)
        try:
            yield
        finally:
            library.set_tqdm_hook(before)
