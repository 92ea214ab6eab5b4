"""Answers of S3 servers are read by their code: what is no outage ends at once, with cause and remedy."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.errors import InvalidStateError, MillraceError, PermissionDeniedError
from millrace.storage.clean_up import RetryPolicy, delete
from millrace.storage.s3 import S3Store
from millrace.storage.self_test import FORMAT, require_tested, self_test
from millrace.telemetry.leftovers import LEFTOVERS
from millrace_testing.s3_answers import Server, s3_answers


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Server], int]]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    with s3_answers() as running:
        yield running


def store_at(port: int, host: str = "127.0.0.1", *, bucket: str = "b", **options: Any) -> S3Store:
    retry = RetryPolicy(deadline_s=20, max_attempts=4)
    return S3Store(bucket=bucket, endpoint=f"http://{host}:{port}", retry=retry, **options)


NOT_IMPLEMENTED = (501, "NotImplemented", "A header you provided implies functionality that is not implemented", "")
NO_HEADER = (400, "InvalidArgument", "If-None-Match header is not supported", "")
SKEWED = (403, "RequestTimeTooSkewed", "The difference is too large.", "<ServerTime>2026-11-27T09:00:00Z</ServerTime>")
REGION = (400, "AuthorizationHeaderMalformed", "the region 'us-east-1' is wrong; expecting 'garage'", "")
REDIRECT = (301, "PermanentRedirect", "use the endpoint", "<Region>eu-west-3</Region>")
LOCKED = (400, "InvalidRequest", "Content-MD5 is required for Put Object requests with Object Lock parameters", "")
ANSWERS: dict[str, tuple[tuple[int, str, str, str], str, str]] = {
    "conditions are not implemented": (NOT_IMPLEMENTED, "STORE_SEMANTICS", "If-None-Match.*Amazon S3"),
    "conditions are no argument": (NO_HEADER, "STORE_SEMANTICS", "If-None-Match.*InvalidArgument"),
    "the clock is wrong": (SKEWED, "CLOCK_SKEWED", r"here it is 2\d{3}-.* UTC, there 2026-11-27T09:00:00Z.*clock"),
    "another region": (REGION, "STORE_REGION", "'garage'.*AWS_REGION=garage"),
    "a redirection": (REDIRECT, "STORE_REGION", "AWS_REGION=eu-west-3"),
    "object lock": (LOCKED, "STORE_REFUSED", "without Object Lock"),
    "denied": ((403, "AccessDenied", "no", ""), "STORE_DENIED", "AWS_ACCESS_KEY_ID"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_that_no_try_mends_is_told_at_once(server: tuple[type[Server], int], case: str) -> None:
    handler, port = server
    answer, reason, message = ANSWERS[case]
    handler.refuses["create"] = answer
    with pytest.raises(MillraceError, match=message) as raised:
        store_at(port).create("k", b"x")
    assert raised.value.reason == reason
    assert len(handler.seen) <= 2, "the client itself asks once more where it is redirected, and ours never"


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted", "Conflict"])
def test_a_conflict_of_creates_is_tried_again(server: tuple[type[Server], int], code: str) -> None:
    handler, port = server
    handler.refuses["create"], handler.times["create"] = (409, code, "", ""), 1
    assert store_at(port).create("k", b"x")
    assert len(handler.seen) == 2


@pytest.mark.parametrize(("answer", "reason"), [(SKEWED, "CLOCK_SKEWED"), (REGION, "STORE_REGION")])
def test_a_head_without_a_body_is_asked_for_its_reason(
    server: tuple[type[Server], int], answer: tuple[int, str, str, str], reason: str
) -> None:
    handler, port = server
    handler.refuses |= {"HEAD": answer, "GET": answer}
    with pytest.raises(MillraceError) as raised:
        store_at(port).head("k")
    assert raised.value.reason == reason


@pytest.mark.parametrize(("start", "length", "wanted"), [(2, 3, "2-4"), (5, 10, "5-14")])
def test_a_server_that_ignores_ranges_is_named(
    server: tuple[type[Server], int], start: int, length: int, wanted: str
) -> None:
    handler, port = server
    handler.has_ranges = False
    store = store_at(port)
    store.put("k", b"0123456789")
    with pytest.raises(InvalidStateError, match=f"asked for bytes={wanted}, it answers with all 10 bytes") as raised:
        store.get_range("k", start, length)
    assert raised.value.reason == "STORE_SEMANTICS"


def test_what_an_answer_lacks_is_named(server: tuple[type[Server], int]) -> None:
    handler, port = server
    store = store_at(port)
    store.put("p/k", b"0123456789")
    handler.has_lengths = False
    for read in (lambda: store.get("p/k"), lambda: store.get_range("p/k", 2, 3)):
        with pytest.raises(InvalidStateError, match="lacks ContentLength") as raised:
            read()
        assert raised.value.reason == "STORE_SEMANTICS"
    handler.has_lengths, handler.is_cut = True, True
    with pytest.raises(InvalidStateError, match="lacks NextContinuationToken"):
        list(store.list("p/"))


@pytest.mark.parametrize(("status", "reason"), [(500, "STORE_FAILING"), (502, "STORE_UNREACHABLE")])
def test_a_server_that_fails_is_told_from_one_that_is_not_there(
    server: tuple[type[Server], int], status: int, reason: str
) -> None:
    handler, port = server
    handler.refuses["PUT"], handler.times["PUT"] = (status, "InternalError", "", ""), 9
    with pytest.raises(MillraceError) as raised:
        store_at(port).put("k", b"x")
    assert raised.value.reason == reason


def test_the_bucket_becomes_a_host_name_where_the_server_wants_that(
    server: tuple[type[Server], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, port = server
    real = socket.getaddrinfo

    def here(host: Any, *args: Any, **kwargs: Any) -> Any:
        return real("127.0.0.1" if str(host).endswith("store.test") else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", here)
    store = store_at(port, "store.test", bucket="bucket")
    handler.refuses["PUT"] = (403, "SecondLevelDomainForbidden", "Please use virtual hosted style to access.", "")
    handler.times["PUT"] = 1
    store.put("k", b"x")
    assert handler.hosts[0] == "store.test" and handler.hosts[-1] == "bucket.store.test"
    assert list(handler.stored) == ["/k"] and store.get("k") == b"x"
    handler.seen.clear()
    handler.times.clear()
    with pytest.raises(InvalidStateError, match="addressing=virtual") as raised:
        store_at(port, "store.test", bucket="bucket", addressing="path").put("k", b"x")
    assert raised.value.reason == "STORE_ADDRESSING" and len(handler.seen) == 1


def test_markers_of_folders_are_no_objects(server: tuple[type[Server], int]) -> None:
    handler, port = server
    handler.stored |= {"/b/p/": b"", "/b/p/a": b"1", "/b/p/sub/": b"", "/b/p/sub/c": b"1"}
    assert [each.key for each in store_at(port).list("p/")] == ["p/a", "p/sub/c"]


def test_the_first_error_is_told_and_not_that_of_the_clean_up(server: tuple[type[Server], int]) -> None:
    handler, port = server
    denied = (403, "AccessDenied", "", "")
    handler.refuses |= {"DELETE": denied, "create": NOT_IMPLEMENTED}
    with pytest.raises(InvalidStateError, match="If-None-Match"):
        self_test(store_at(port), prefix="p")
    handler.refuses = {"create": denied}
    with pytest.raises(PermissionDeniedError):
        self_test(store_at(port), prefix="p")


@pytest.mark.parametrize("answer", [(403, "AccessDenied", "", ""), (405, "MethodNotAllowed", "", "")])
def test_a_bucket_without_delete_holds_nothing_up(
    server: tuple[type[Server], int], answer: tuple[int, str, str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """One request, one warning and one count for each object; who asks again meanwhile sends none."""
    handler, port = server
    handler.refuses["DELETE"] = answer
    store, kind = store_at(port), f"object that {answer[1]} keeps"
    keys = [f"{answer[1]}/{number}" for number in (1, 2)]
    for key in keys:
        store.put(key, b"x")
        left = delete(store, key, what=kind)
        assert left is not None and answer[1] in str(left)
        assert delete(store, key, what=kind) is not None
    assert [kind for kind, _ in handler.seen].count("DELETE") == 2
    assert LEFTOVERS.failures()[kind] == 2
    assert [caplog.text.count(store.uri(key)) > 0 for key in keys] == [True, True]


def test_a_store_is_tested_once_under_each_address(server: tuple[type[Server], int]) -> None:
    handler, port = server
    handler.refuses["DELETE"] = (403, "AccessDenied", "", "")  # what cannot be deleted is no reason to refuse it
    require_tested(store_at(port), prefix="p").result()
    assert [kind for kind, _ in handler.seen].count("create") > 16
    [passed] = [name for name in handler.stored if f"/b/p/self-test/passed-{FORMAT}-" in name]
    handler.seen.clear()
    require_tested(store_at(port), prefix="p").result()
    assert handler.seen == [("HEAD", passed)], "remembered"
    require_tested(store_at(port, "localhost"), prefix="p").result()
    assert len(handler.seen) > 16
