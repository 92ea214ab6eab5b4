"""Tokens on the way: the interceptor that asks callers for theirs, and those that show ours.

The gate stands before everything else. A call that is not let in gets the same answer whether its method exists or not,
and none of its request is read; one whose token may only read hears so. A stream is asked again before each message,
because tokens expire and are revoked.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from millrace.errors import MillraceError, PermissionDeniedError, UnauthenticatedError
from millrace.rpc import status
from millrace.rpc.access import AUTHORIZATION, ClientAccess, Grant, ServerAccess, denied
from millrace.rpc.interceptors import request_id_of

logger = logging.getLogger(__name__)


class Gate(grpc.aio.ServerInterceptor):
    """Lets calls in or answers UNAUTHENTICATED or PERMISSION_DENIED; the first interceptor of a server."""

    def __init__(self, access: ServerAccess) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Ask for the token, then find the handler."""
        metadata = tuple(handler_call_details.invocation_metadata or ())
        method: str = handler_call_details.method
        request_id = request_id_of(metadata)
        try:
            grant = self._access.admit(method, metadata)
        except (UnauthenticatedError, PermissionDeniedError) as error:
            return _refusal(error, method, request_id)
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
    """End calls of every arity without reading a message."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        fields = {"method": method, "reason": error.reason, "peer": context.peer(), "request_id": request_id}
        logger.info("call refused", extra=fields)
        await status.abort(context, error, request_id=request_id)
        yield b""  # never reached: makes it a generator

    return grpc.stream_stream_rpc_method_handler(refuse)


def _while_granted(behaviour: Callable[..., Any], grant: Grant, method: str, request_id: str) -> Callable[..., Any]:
    async def handle(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        async with contextlib.aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                if not grant.holds():
                    fields = {"method": method, "peer": context.peer(), "token_name": grant.name}
                    logger.info("stream ended: its token is not accepted any more", extra=fields)
                    await status.abort(context, denied(), request_id=request_id)
                yield response

    return handle


def _with_token(details: Any, access: ClientAccess) -> Any:
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
        """Add the header."""
        return await continuation(_with_token(client_call_details, self._access), request)


class ShowTokenStream(grpc.aio.UnaryStreamClientInterceptor):
    """Sends the token of now with every call whose answers stream."""

    def __init__(self, access: ClientAccess) -> None:
        self._access = access

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        """Add the header."""
        return await continuation(_with_token(client_call_details, self._access), request)
