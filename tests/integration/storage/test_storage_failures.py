"""What a store does when the other side fails: visible retries, then an error with a name and a remedy."""

import http.server
import logging
import threading
from collections.abc import Iterator

import pytest

from millrace.errors import InvalidSpecError, PermissionDeniedError, UnavailableError
from millrace.local.redis import free_port
from millrace.storage import open_store
from millrace.storage.clean_up import RetryPolicy
from millrace.storage.s3 import S3Store
from millrace.telemetry import waits


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")


class _Flaky(http.server.BaseHTTPRequestHandler):
    """Answers each request by the next item of `script`: a status, or "drop" after the body has been taken."""

    script: list[object]
    seen: list[tuple[str, str]]
    stored: dict[str, bytes]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen.append((self.command, self.path))
        step = self.script.pop(0) if self.script else 200
        if step == 200 or step == "drop":
            if self.headers.get("If-None-Match") == "*" and self.path in self.stored:
                self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            self.stored[self.path] = data
        if step == "drop":
            self.close_connection = True
            return
        self._answer(step)  # pyright: ignore[reportArgumentType]

    def do_GET(self) -> None:
        self.seen.append((self.command, self.path))
        step = self.script.pop(0) if self.script else 200
        if step == "short":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"only this")
            self.close_connection = True
            return
        if step != 200:
            self._answer(step, b"<Error><Code>InternalError</Code></Error>")  # pyright: ignore[reportArgumentType]
        elif self.path in self.stored:
            self._answer(200, self.stored[self.path])
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")


@pytest.fixture
def flaky() -> Iterator[tuple[type[_Flaky], S3Store]]:
    handler = type("Handler", (_Flaky,), {"script": [], "seen": [], "stored": {}})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        retry = RetryPolicy(deadline_s=20, max_attempts=4)
        yield handler, S3Store(bucket="b", endpoint=endpoint, region="us-east-1", retry=retry)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_server_errors_are_retried_and_logged(flaky, caplog):
    handler, store = flaky
    handler.script += [500, 503, 200]
    with caplog.at_level(logging.WARNING):
        store.put("k", b"data")
    assert handler.stored["/b/k"] == b"data" and len(handler.seen) == 3
    assert "retrying: PUT s3://b/k" in caplog.text
    assert waits.snapshot("test") == []


def test_a_create_whose_answer_was_lost_is_ours(flaky):
    handler, store = flaky
    handler.script += ["drop"]
    assert store.create("k", b"mine") is True
    assert store.create("k", b"mine") is False, "no attempt was lost: somebody else's"


def test_a_create_that_lost_after_a_lost_attempt_is_not_ours(flaky):
    handler, store = flaky
    handler.stored["/b/k"] = b"theirs"
    handler.script += [500]
    assert store.create("k", b"mine") is False


def test_a_truncated_body_is_read_again(flaky):
    handler, store = flaky
    handler.stored["/b/k"] = b"whole"
    handler.script += ["short"]
    assert store.get("k") == b"whole"


def test_giving_up_names_the_endpoint_the_bucket_and_the_remedy(flaky):
    handler, store = flaky
    handler.script += [500] * 10
    with pytest.raises(
        UnavailableError, match=r"http://127.* bucket b failed 4 times.*GET s3://b/k.*MILLRACE_STORE_URL"
    ):
        store.get("k")
    assert len(handler.seen) == 4


def test_an_unreachable_endpoint(caplog):
    endpoint = f"http://127.0.0.1:{free_port()}"
    store = S3Store(bucket="b", endpoint=endpoint, region="us-east-1", retry=RetryPolicy(deadline_s=5, max_attempts=2))
    with pytest.raises(UnavailableError, match=endpoint):
        store.put("k", b"")


def test_a_missing_bucket_is_not_a_missing_object(s3_endpoint):
    store = S3Store(bucket="nobody-made-this", endpoint=s3_endpoint, region="us-east-1")
    for call in (
        lambda: store.get("k"),
        lambda: store.head("k"),
        lambda: store.create("k", b""),
        lambda: list(store.list("")),
    ):
        with pytest.raises(UnavailableError, match="does not exist"):
            call()


def test_denied(flaky):
    handler, store = flaky
    handler.script += [403]
    with pytest.raises(PermissionDeniedError, match="AWS_ACCESS_KEY_ID"):
        store.put("k", b"")
    assert len(handler.seen) == 1, "a denial is not retried"


def test_no_credentials(monkeypatch, s3_endpoint, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(PermissionDeniedError, match="credentials"):
        S3Store(bucket="b", endpoint=s3_endpoint, region="us-east-1").get("k")


def test_a_file_of_parts_is_retried_whole(flaky, tmp_path):
    handler, store = flaky
    (tmp_path / "f").write_bytes(b"content")
    handler.script += [500]
    store.put_file("k", tmp_path / "f")
    assert handler.stored["/b/k"] == b"content"


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "/abs",
            "http://x/b",
            "file://host/abs",
            "file:relative",
            "s3:///key",
            "s3://u:secret@b/x",
            "s3://b?foo=1",
        ),
        *("s3://b?endpoint=http://u:secret@host:1", "s3://b?endpoint=http%3A%2F%2Fu%3Asecret%40host"),
    ],
)
def test_bad_store_urls(url):
    with pytest.raises(InvalidSpecError, match="MILLRACE_STORE_URL") as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_store_urls(tmp_path, s3_endpoint):
    local = open_store(f"file://{tmp_path}/with%20space")
    local.put("k", b"x")
    assert (tmp_path / "with space" / "k").read_bytes() == b"x"
    remote = open_store(f"s3://bucket-of-urls/some/prefix?endpoint={s3_endpoint}&region=eu-west-1")
    assert isinstance(remote, S3Store)
    remote.ensure_bucket()
    remote.put("k", b"x")
    assert remote.uri("k") == "s3://bucket-of-urls/some/prefix/k"
    assert open_store(f"s3://bucket-of-urls?endpoint={s3_endpoint}").get("some/prefix/k") == b"x"
