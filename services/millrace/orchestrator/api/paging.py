"""Pages of lists: their sizes, and the tokens between them."""

import base64
import re
import zlib
from typing import Any

from google.protobuf.message import Message

from millrace.errors import InvalidSpecError, Violation

PAGE_DEFAULT, PAGE_MAX = 50, 1000
_NUMBERS = re.compile(r"[0-9a-f]{8}((?:\.[0-9]{1,10}){1,4})")


def page_size(size: int) -> int:
    """How many are asked for, within the limits; InvalidSpecError if the number is negative."""
    if size < 0:
        raise InvalidSpecError([Violation(field="page_size", value=str(size), message="must not be negative")])
    return min(size or PAGE_DEFAULT, PAGE_MAX)


def page(size: int, token: str) -> tuple[int, int]:
    """Size and first place of a page of a list that is counted through."""
    wanted = page_size(size)
    try:
        start = int(base64.urlsafe_b64decode(token.encode())) if token else 0
        if start < 0:
            raise ValueError("negative")
    except ValueError as error:
        raise _no_token(token) from error
    return wanted, start


def next_token(start: int, total: int) -> str:
    """The token of the page that begins at `start`; empty at the end."""
    return base64.urlsafe_b64encode(str(start).encode()).decode() if start < total else ""


def token_of(request: Any, *numbers: int) -> str:
    """A token with these numbers that fits only this request: its next page."""
    return base64.urlsafe_b64encode(".".join([_digest(request), *map(str, numbers)]).encode()).decode()


def numbers_of(request: Any, *, count: int) -> tuple[int, ...] | None:
    """The numbers of the request's token; None without one, InvalidSpecError if it is of another request, or none."""
    token: str = request.page_token
    if not token:
        return None
    try:
        text = base64.urlsafe_b64decode(token.encode()).decode("ascii")
    except ValueError as error:
        raise _no_token(token) from error
    match = _NUMBERS.fullmatch(text)
    numbers = tuple(int(number) for number in match[1].split(".")[1:]) if match else ()
    if len(numbers) != count:
        raise _no_token(token)
    if not text.startswith(_digest(request)):
        problem = Violation(field="page_token", message="belongs to another request: only page_size may change")
        raise InvalidSpecError([problem], reason="PAGE_TOKEN_INVALID", remedy="leave it out for the first page")
    return numbers


def _digest(request: Message) -> str:
    """What a request asks for, apart from which page."""
    asked = type(request)()
    asked.CopyFrom(request)
    asked.ClearField("page_token")
    asked.ClearField("page_size")
    return f"{zlib.crc32(asked.SerializeToString(deterministic=True)):08x}"


def _no_token(token: str) -> InvalidSpecError:
    problem = Violation(field="page_token", value=token[:80], message="is not a token of this API: leave it out")
    return InvalidSpecError([problem], reason="PAGE_TOKEN_INVALID")
