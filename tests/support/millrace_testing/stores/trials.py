"""What is tried on a server, beside the self-test: each thing by itself, so that a page can say what it can do."""

import contextlib
import hashlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from millrace.errors import MillraceError
from millrace.storage.s3 import S3Store
from millrace.storage.s3_errors import http_status
from millrace.storage.self_test import self_test

PAGE_KEYS = 5
_PARTS_BYTES = 65 << 20
"""Just above the size from which files go up in parts."""


def created_once(store: S3Store, _: Path) -> None:
    """Require that a create-only PUT of a taken name is refused."""
    if not store.create("create", b"first"):
        raise AssertionError("refused though the name was free")
    if store.create("create", b"second"):
        raise AssertionError("replaced what was there")


def swapped(store: S3Store, _: Path) -> None:
    """Require that a PUT with If-Match replaces the named version only. Runs use none."""
    bucket, name = store.uri("swap").removeprefix("s3://").split("/", 1)
    request: dict[str, Any] = {"Bucket": bucket, "Key": name}
    first = store.client.put_object(**request, Body=b"1")["ETag"]
    store.client.put_object(**request, Body=b"2", IfMatch=first)
    try:
        store.client.put_object(**request, Body=b"3", IfMatch=first)
    except ClientError as error:
        if http_status(error) == 412:
            return
        raise
    raise AssertionError("an old version was taken for the present one")


def ranged(store: S3Store, _: Path) -> None:
    """Require that a part of an object can be read."""
    store.put("range", b"0123456789")
    if store.get_range("range", 2, 3) != b"234" or store.get_range("range", 8, 2) != b"89":
        raise AssertionError("other bytes than were asked for")


def paged(store: S3Store, _: Path) -> None:
    """Require that a listing comes in pages, in order, from the given start."""

    def small(params: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {**params, "MaxKeys": PAGE_KEYS}

    keys = [f"list/{number:03}" for number in range(12)] + ["list/sub/a"]
    for key in keys:
        store.put(key, b"x")
    event = "provide-client-params.s3.ListObjectsV2"
    store.client.meta.events.register(event, small)
    try:
        if (found := [each.key for each in store.list("list/")]) != keys:
            raise AssertionError(f"{len(found)} of {len(keys)} keys, or not in order")
        if [each.key for each in store.list("list/", start_after="list/005")] != keys[6:]:
            raise AssertionError("start-after is not kept")
        if list(store.list_prefixes("list/")) != ["list/sub/"]:
            raise AssertionError("the folder below is not shown")
    finally:
        store.client.meta.events.unregister(event, small)


def uploaded_in_parts(store: S3Store, directory: Path) -> None:
    """Require that a file of 65 MiB goes up in parts, and comes back unchanged."""
    path, back = directory / "parts", directory / "parts-back"
    path.write_bytes(hashlib.shake_256(b"parts").digest(1 << 20) * (_PARTS_BYTES >> 20))
    try:
        store.put_file("parts", path)
        store.get_file("parts", back)
        if hashlib.sha256(back.read_bytes()).digest() != hashlib.sha256(path.read_bytes()).digest():
            raise AssertionError("other bytes than went up")
    finally:
        path.unlink()
        back.unlink(missing_ok=True)
    store.delete("parts")


TRIALS: dict[str, Callable[[S3Store, Path], None]] = {
    "create-only PUT": created_once,
    "compare-and-swap": swapped,
    "ranges": ranged,
    "pages": paged,
    "parts": uploaded_in_parts,
}


def outcomes(store: S3Store, directory: Path) -> dict[str, str]:
    """Return for each trial an empty text, or why it failed in some words."""
    found = {}
    for name, trial in TRIALS.items():
        try:
            trial(store, directory)
            found[name] = ""
        except (AssertionError, MillraceError, ClientError, BotoCoreError) as error:
            found[name] = _short(error)
    return found


def put_s(store: S3Store) -> float:
    """Return the seconds that a conditional PUT takes while nobody else writes: the middle one of nine."""
    times = []
    for number in range(9):
        began = time.monotonic()
        with contextlib.suppress(MillraceError):
            store.create(f"timed/{number}", b"x")
        times.append(time.monotonic() - began)
    return statistics.median(times)


def judged(store: S3Store) -> tuple[str, str, tuple[float, float]]:
    """Run the self-test; return the reason and message of a refusal (empty if it passes) and the seconds it took.

    These are until it is known whether runs may begin, and until the last writer has its answer.
    """
    began = time.monotonic()
    known_s = None
    try:
        answered = self_test(store, prefix="judged")
        known_s = time.monotonic() - began
        answered.result()
    except MillraceError as error:
        took_s = time.monotonic() - began
        return error.reason, error.message, (known_s or took_s, took_s)
    return "", "", (known_s, time.monotonic() - began)


def _short(error: Exception) -> str:
    if isinstance(error, BotoCoreError):
        return "no answer"
    if isinstance(error, ClientError):
        return f"HTTP {http_status(error)}"
    text = error.message if isinstance(error, MillraceError) else str(error)
    return shortened(text)


def shortened(message: str) -> str:
    """Return what an error says of the server, without where the server is."""
    return message.partition("cannot carry runs: ")[2] or message.rpartition("): ")[2] or message
