"""Starting fast: recovery time is mostly the imports of big libraries.

Imports make hundreds of thousands of objects that live as long as the process. Python's cyclic garbage collector walks
them again and again while they grow, which costs a quarter of the CPU time of importing torch, transformers or
verifiers, and finds nothing.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

_LOCK = threading.Lock()
_depth = 0


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Switch garbage collection off in this block, for imports, and exclude all objects that exist after it for good.

    Blocks may overlap in threads. Not for code that makes much garbage in cycles.
    """
    global _depth
    with _LOCK:
        _depth += 1
        gc.disable()
    try:
        yield
    finally:
        with _LOCK:
            _depth -= 1
            if _depth == 0:
                gc.freeze()
                gc.enable()
