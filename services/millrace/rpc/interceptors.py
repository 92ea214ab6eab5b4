"""What happens around every call: a request id, one log line, and errors that arrive as what they are.

A handler raises `millrace.errors.*`; the caller gets the same class. Anything else that a handler raises is a defect:
the caller gets INTERNAL with the request id and nothing about our insides, the log gets the traceback. Bytes that are
no message never reach a handler: the caller gets INVALID_ARGUMENT.
"""

import asyncio
import contextlib
import inspect
import logging
import math
import re
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from millrace.decoding import decode_request
from millrace.errors import (
    InternalError,
    InvalidSpecError,
    MillraceError,
    PermissionDeniedError,
    UnauthenticatedError,
    Violation,
)
from millrace.rpc import status
from millrace.rpc.access import AUTHORIZATION, ClientAccess, Grant, ServerAccess, denied, set_caller
from millrace.telemetry.logging import bind

logger = logging.getLogger(__name__)

REQUEST_ID_KEY = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")  # what a client sends ends up in our log, so it is checked


def new_request_id() -> str:
    """Return a fresh request id."""
    return uuid.uuid4().hex


def request_id_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the caller's request id if it sent a well-formed one, else a fresh one."""
    for key, value in metadata:
        if key == REQUEST_ID_KEY and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    return new_request_id()


@contextlib.asynccontextmanager
async def _guarded(method: str, request_id: str, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Log the call that the block handles, and end it with a status if the block raises.

    A class of `millrace.errors` is sent as it is. Anything else is a defect: it is logged with its traceback, and the
    caller gets INTERNAL and the request id alone. While the block runs, `request_id` is bound in the log's context.
    """
    began = time.monotonic()

    def fields(code: str, **more: Any) -> dict[str, Any]:
        """Return the fields of the log's line: method, code, seconds since the call began, and `more`."""
        return {"method": method, "code": code, "seconds": round(time.monotonic() - began, 6), **more}

    with bind(request_id=request_id):
        try:
            yield
        # The handler ended the call itself, with a status of its own.
        except grpc.aio.AbortError:
            logger.info("call aborted", extra=fields(_code_of(context), peer=context.peer()))
            raise
        except asyncio.CancelledError:
            logger.debug("call cancelled", extra=fields("CANCELLED", peer=context.peer()))
            raise
        except MillraceError as error:
            defect = isinstance(error, InternalError)
            more = {"reason": error.reason, "error": str(error), "peer": context.peer()}
            log = logger.error if defect else logger.info
            log("call failed", exc_info=defect, extra=fields(error.code, **more))
            await status.abort(context, error, request_id=request_id)
        except Exception:  # the edge of a call: a defect becomes INTERNAL
            logger.exception("call failed by a defect", extra=fields("INTERNAL", peer=context.peer()))
            hidden = InternalError(
                f"internal error in {method}",
                remedy=f"look for request id {request_id} in the server's log",
                metadata={"request_id": request_id},
            )
            await status.abort(context, hidden, request_id=request_id)
        else:
            logger.debug("call done", extra=fields("OK"))


def _code_of(context: grpc.aio.ServicerContext) -> str:
    """Return the name of the status code that a handler has set, or its number as text."""
    code = context.code()  # the enum, or its number, depending on how it was set
    return code.name if isinstance(code, grpc.StatusCode) else str(code)


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every asynchronous handler; see the module's docstring."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler of the called method, wrapped: calls are logged, and errors become a status.

        None for an unknown method. A malformed request is refused before the handler gets it. `continuation` returns
        the handler for these details.
        """
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler  # unknown method: gRPC answers UNIMPLEMENTED
        arity = {False: "unary", True: "stream"}
        kind = f"{arity[handler.request_streaming]}_{arity[handler.response_streaming]}"
        behaviour = getattr(handler, kind)
        request_id = request_id_of(handler_call_details.invocation_metadata or ())
        method: str = handler_call_details.method
        if inspect.isasyncgenfunction(behaviour):
            wrapped = _wrap_generator(behaviour, method, request_id)
        elif inspect.iscoroutinefunction(behaviour):
            wrapped = _wrap_coroutine(behaviour, method, request_id)
        else:  # a generated method that nobody overrode
            wrapped = _unimplemented(is_stream=handler.response_streaming)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(
            wrapped,
            request_deserializer=_typed(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


@dataclass(frozen=True, slots=True)
class _Malformed:
    """In place of a request that does not decode: gRPC would answer what its deserializer raises with UNKNOWN."""

    error: InvalidSpecError


def _typed(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Wrap a deserializer: bytes that do not decode become a `_Malformed` in place of the request. None stays None."""

    def deserialize(data: bytes) -> Any:
        """Return the decoded request, or the error of one that does not decode, in its place."""
        assert parse is not None
        try:
            return decode_request(parse, data)
        except InvalidSpecError as error:
            return _Malformed(error)

    return None if parse is None else deserialize


def _formed(request: Any) -> Any:
    """Return the request, or the stream of requests; raise InvalidSpecError if its bytes or values are malformed.

    Of a stream each message is checked when it comes.
    """
    if isinstance(request, _Malformed):
        raise request.error
    check_request(request)
    return _all_formed(request) if isinstance(request, AsyncIterable) else request


async def _all_formed(requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
    """Yield the messages of a stream of requests; raise InvalidSpecError at the first malformed one."""
    async for request in requests:
        yield _formed(request)


def _wrap_coroutine(behaviour: Callable[..., Awaitable[Any]], method: str, request_id: str) -> Callable[..., Any]:
    """Return a handler with one response that checks the request, logs the call and turns errors into a status.

    `behaviour` is the servicer's method.
    """

    async def handle(request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Return the servicer's response to a checked request, within the guard."""
        async with _guarded(method, request_id, context):
            return await behaviour(_formed(request), context)

    return handle


def _wrap_generator(behaviour: Callable[..., Any], method: str, request_id: str) -> Callable[..., Any]:
    """Return a handler with a stream of responses that checks the request, logs the call and turns errors into a
    status.

    `behaviour` is the servicer's method.
    """

    async def handle(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Yield the servicer's responses to a checked request, within the guard."""
        # Closed here when the caller leaves: the clean-up of the servicer's method runs within the guard, and not when
        # the garbage collector finds the generator.
        async with (
            _guarded(method, request_id, context),
            contextlib.aclosing(behaviour(_formed(request), context)) as responses,
        ):
            async for response in responses:
                yield response

    return handle


def _unimplemented(*, is_stream: bool) -> Callable[..., Any]:
    """Return a handler that answers UNIMPLEMENTED, for a method with a stream of responses if `is_stream`."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not implemented!")

    async def refuse_stream(_: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not implemented!")
        yield  # never reached: makes it a generator

    return refuse_stream if is_stream else refuse


class DefaultDeadline(grpc.aio.UnaryUnaryClientInterceptor):
    """Gives unary calls a deadline where the caller set none, so that no call waits without end."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        """Continue a client's call, with the default deadline if it has none, and return what `continuation`
        returns.
        """
        if client_call_details.timeout is None:
            client_call_details = client_call_details._replace(timeout=self._timeout_s)
        return await continuation(client_call_details, request)


# What no field of any request may hold, checked before its handler: the handlers check what their fields mean.
#
# Refused are numbers that are not finite, enum values that this release does not know, and names (every string that
# is not free text) that are longer than any name or hold control characters, which would end up in keys, paths and
# logs.

MAX_NAME_CHARS = 2048
MAX_TEXT_CHARS = 64 * 1024
"""Longest free text; JSON documents have bounds of their own."""
MAX_ITEMS = 10_000
"""Most entries of one list or map."""
_MAX_REPORTED = 20
_FREE_TEXT = ("reason", "message", "error", "_json")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def check_request(request: Any) -> None:
    """Raise InvalidSpecError naming up to `_MAX_REPORTED` fields that hold a value no request may hold.

    Refused are unknown enum values, numbers that are not finite, names or texts that are too long, control characters
    in names, and lists that are too long. What is no protobuf message passes.
    """
    if not isinstance(request, Message):
        return
    found: list[Violation] = []
    # Lazily: of a request full of errors no more is read than is reported.
    for violation in _violations(request, ""):
        found.append(violation)
        if len(found) == _MAX_REPORTED:
            break
    if found:
        raise InvalidSpecError(found, reason="REQUEST_INVALID")


def _violations(message: Message, prefix: str) -> Iterator[Violation]:
    """Yield a violation for each value in a message, and in those inside it, that no request may hold.

    Those are lists of over `MAX_ITEMS` entries, unknown enum values, numbers that are not finite, and strings that are
    too long or, in names, have control characters. `prefix` is the path to the message, with a dot at its end, or
    empty.
    """
    # Fields that are not set are not listed: the defaults are legal.
    for field, value in message.ListFields():
        where = f"{prefix}{field.name}"
        if not field.is_repeated:
            yield from _of_value(field, value, where)
        elif len(value) > MAX_ITEMS:
            yield Violation(field=where, value=f"{len(value)} entries", message=f"at most {MAX_ITEMS} are taken")
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            key_field, value_field = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for key in value:
                yield from _of_value(key_field, key, f"{where} (a key)")
                yield from _of_value(value_field, value[key], f"{where}[{str(key)[:80]!r}]")
        else:
            for index, item in enumerate(value):
                yield from _of_value(field, item, f"{where}[{index}]")


def _of_value(field: FieldDescriptor, value: Any, where: str) -> Iterator[Violation]:
    """Yield a violation if one value of `field` is an unknown enum value, a number that is not finite, or a bad string.

    Of a message its inner values are checked. `where` is the value's path, for the violation.
    """
    # Enums of proto3 are open: the decoder keeps a number that it does not know.
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_MESSAGE:
            yield from _violations(value, f"{where}.")
        case FieldDescriptor.CPPTYPE_ENUM if (enum := field.enum_type) and value not in enum.values_by_number:
            yield Violation(field=where, value=str(value), message=f"is no {enum.name} of this release")
        case FieldDescriptor.CPPTYPE_STRING if isinstance(value, str):
            yield from _of_text(field.name, value, where)
        case kind if kind in _FLOATS and not math.isfinite(value):
            yield Violation(field=where, value=str(value), message="must be a finite number")


def _of_text(name: str, text: str, where: str) -> Iterator[Violation]:
    """Yield a violation if a string of the field `name` is too long, or is a name with control characters.

    Fields whose names end as `_FREE_TEXT` says hold texts, which may be longer and have any characters; those that end
    in "_json" are not checked. `where` is the string's path, for the violation.
    """
    if name.endswith("_json"):
        return
    is_name = not name.endswith(_FREE_TEXT)
    limit = MAX_NAME_CHARS if is_name else MAX_TEXT_CHARS
    if len(text) > limit:
        yield Violation(field=where, value=f"{len(text)} characters", message=f"must have at most {limit}")
    elif is_name and _CONTROL.search(text):
        yield Violation(field=where, value=repr(text[:80]), message="must hold no control characters")


# Tokens on the way: the interceptor that asks callers for theirs, and those that show ours.
#
# The gate is before everything else. A call that is not let in gets the same answer whether its method exists or
# not, and none of its request is read; one whose token may only read hears so. A stream is asked again before each
# message, because tokens expire and are revoked.


class Gate(grpc.aio.ServerInterceptor):
    """Lets calls in or answers UNAUTHENTICATED or PERMISSION_DENIED; the first interceptor of a server."""

    def __init__(self, access: ServerAccess) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler of the called method if the call's token is accepted, else one that refuses the call.

        The handler runs as a call of the token's tenant (`calling_tenant`). A stream of answers is ended once its token
        is not accepted any more. `continuation` returns the handler for
        these details.
        """
        metadata = tuple(handler_call_details.invocation_metadata or ())
        method: str = handler_call_details.method
        request_id = request_id_of(metadata)
        try:
            grant = self._access.admit(method, metadata)
        except (UnauthenticatedError, PermissionDeniedError) as error:
            return _refusal(error, method, request_id)
        # gRPC answers each call in a task of its own, which goes on with the handler.
        set_caller(grant.tenant)
        handler = await continuation(handler_call_details)
        if handler is None or not handler.response_streaming:
            return handler
        kind = "stream_stream" if handler.request_streaming else "unary_stream"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(
            _while_granted(getattr(handler, kind), grant, method, request_id),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _refusal(error: MillraceError, method: str, request_id: str) -> grpc.RpcMethodHandler:
    """Return a handler, for calls of every arity, that logs the refusal and ends the call with the error; it reads
    no message.
    """

    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Log the refusal and end the call with the error."""
        fields = {"method": method, "reason": error.reason, "peer": context.peer(), "request_id": request_id}
        logger.info("call refused", extra=fields)
        await status.abort(context, error, request_id=request_id)
        yield b""  # never reached: makes it a generator

    # gRPC takes such a handler for a call of any arity, and deserialises no message for it before it is read.
    return grpc.stream_stream_rpc_method_handler(refuse)


def _while_granted(behaviour: Callable[..., Any], grant: Grant, method: str, request_id: str) -> Callable[..., Any]:
    """Return a handler that ends its stream of responses with UNAUTHENTICATED once the `grant` does not hold any more.

    It is asked before each response. `behaviour` is the handler that makes the responses.
    """

    async def handle(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Yield the handler's responses as long as the caller's token is accepted; then end the call."""
        async with contextlib.aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                if not grant.holds():
                    fields = {"method": method, "peer": context.peer(), "token_name": grant.name}
                    logger.info("stream ended: its token is not accepted any more", extra=fields)
                    await status.abort(context, denied(), request_id=request_id)
                yield response

    return handle


def _with_token(details: Any, access: ClientAccess) -> Any:
    """Return the details of a client's call with the current bearer token added to its metadata, if `access` has
    one.
    """
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    if access.secret is not None:
        metadata.add(AUTHORIZATION, f"Bearer {access.secret()}")
    return details._replace(metadata=metadata)


class ShowTokenUnary(grpc.aio.UnaryUnaryClientInterceptor):
    """Sends the token of now with every unary call."""

    def __init__(self, access: ClientAccess) -> None:
        self._access = access

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        """Continue a client's call with the current token in its metadata, and return what `continuation` returns."""
        return await continuation(_with_token(client_call_details, self._access), request)


class ShowTokenStream(grpc.aio.UnaryStreamClientInterceptor):
    """Sends the token of now with every call whose answers stream."""

    def __init__(self, access: ClientAccess) -> None:
        self._access = access

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        """Continue a client's call with the current token in its metadata, and return what `continuation` returns."""
        return await continuation(_with_token(client_call_details, self._access), request)
