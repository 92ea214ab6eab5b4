"""moto's S3 server, with conditional writes that are atomic as S3's are: moto itself looks, and then writes.

`python -m millrace_testing.atomic_moto -H HOST -p PORT`, as `python -m moto.server`.
"""

import io
import threading
from collections.abc import Iterable
from typing import Any

from moto import server


class AtomicWrites(server.DomainDispatcherApplication):
    """Serves one `If-None-Match` request at a time, from when its body is there."""

    def __init__(self, create_app: Any) -> None:
        super().__init__(create_app)
        self._writing = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Handle a request."""
        if "HTTP_IF_NONE_MATCH" not in environ or environ["REQUEST_METHOD"] not in ("PUT", "POST"):
            return super().__call__(environ, start_response)
        if length := int(environ.get("CONTENT_LENGTH") or 0):
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
        with self._writing:
            return super().__call__(environ, start_response)


if __name__ == "__main__":
    server.DomainDispatcherApplication = AtomicWrites  # type: ignore[misc] - `main` makes its application by this name
    server.main()
