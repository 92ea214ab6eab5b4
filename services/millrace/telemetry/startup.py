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
    """Switch the cyclic garbage collector off in this block, for imports; afterwards it is on.

    Objects that exist at the end of the block are never collected later (`gc.freeze`). Blocks may overlap in threads:
    the end of the last one counts. Not for code that makes much garbage in cycles.
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
            # Only the last block may switch it on: others still import.
            if _depth == 0:
                # What is frozen is never walked again, also not by the collections of later garbage.
                gc.freeze()
                gc.enable()
