"""TLS from mounted files: credentials for gRPC and contexts for HTTP, which follow the files when they change.

A certificate is renewed by writing new files; no restart is needed. Servers look at their files at every handshake,
clients when they call. New files that do not fit each other (half of a renewal) are left alone until they do.
"""

import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from millrace.errors import InvalidSpecError, Violation

logger = logging.getLogger(__name__)

SYSTEM_CA = Path("system")
"""In place of a file: the certificates that the system trusts."""

Stamp = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFiles:
    """What a server shows, and whom it lets in."""

    cert: Path
    key: Path
    client_ca: Path | None = None
    """Callers must show a certificate that one of these signed; None asks for none."""

    def stamp(self) -> Stamp:
        """Return a value that differs from an earlier one when one of the files has changed since."""
        return stamp_of(self.cert, self.key, self.client_ca)

    def check(self) -> None:
        """Raise InvalidSpecError naming the variable and the file if one is missing, is no PEM, or does not fit the
        others.
        """
        server_context(self)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of a gRPC server that follow the files: at each handshake new files are used, if they are
        right.

        InvalidSpecError if they are wrong now; later wrong ones are logged, and the last good ones stay in use.
        """
        self.check()
        seen = self.stamp()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Return new credentials, or None to keep the old ones; gRPC's threads call it at each handshake."""
            nonlocal seen
            now = self.stamp()
            if now == seen:
                return None
            try:
                self.check()
                made = self._configuration()
            except (InvalidSpecError, OSError) as error:
                logger.error("the new certificate is not used yet", extra={"error": str(error)})
                return None
            # gRPC's threads may come here at once: the first one logs the change.
            if seen != now:
                logger.info("serving a new certificate", extra={"path": str(self.cert)})
            seen = now
            return made

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            fetch,  # pyright: ignore[reportArgumentType] - None is documented, and the stubs forgot it
            require_client_authentication=self.client_ca is not None,
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        """Read the files into gRPC's form: certificate with key, and the CA of callers, if one is demanded."""
        roots = None if self.client_ca is None else self.client_ca.read_bytes()
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFiles:
    """Whom a client trusts, and what it shows to servers that ask."""

    ca: Path
    """`SYSTEM_CA` is what the system trusts."""
    cert: Path | None = None
    key: Path | None = None
    server_name: str | None = None
    """Name that servers' certificates must bear, instead of the host that is called."""

    def stamp(self) -> Stamp:
        """Return a value that differs from an earlier one when one of the files has changed since."""
        return stamp_of(None if self.ca == SYSTEM_CA else self.ca, self.cert, self.key)

    def grpc_credentials(self) -> grpc.ChannelCredentials:
        """Return gRPC channel credentials of the files as they are now; InvalidSpecError if they are wrong."""
        client_context(self)
        chain = self.cert.read_bytes() if self.cert else None
        key = self.key.read_bytes() if self.key else None
        roots = _system_roots() if self.ca == SYSTEM_CA else self.ca.read_bytes()
        return grpc.ssl_channel_credentials(roots, key, chain)


def server_context(files: ServerFiles) -> ssl.SSLContext:
    """Return the TLS context of an HTTP server, which demands client certificates if a CA for them is set.

    InvalidSpecError names the variable and the file that is wrong.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_chain(context, files.cert, files.key)
    if files.client_ca is not None:
        _load_roots(context, files.client_ca, field="MILLRACE_TLS_CLIENT_CA")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def rotating_server_context(files: ServerFiles) -> ssl.SSLContext:
    """Return a TLS context of an HTTP server that follows the files: every handshake uses the current ones.

    InvalidSpecError if they are wrong now; wrong ones later are logged, and the last good ones stay in use.
    """
    current, seen = server_context(files), files.stamp()

    def choose(connection: Any, _: str | None, __: ssl.SSLContext) -> None:
        """Give a connection in its handshake the context of the current files.

        The signature is that of `sni_callback`.
        """
        nonlocal current, seen
        now = files.stamp()
        if now != seen:
            try:
                current, seen = server_context(files), now
                logger.info("serving a new certificate over HTTP", extra={"path": str(files.cert)})
            except InvalidSpecError as error:
                logger.error("the new certificate is not used yet", extra={"error": str(error)})
        # Python's documented way to choose a certificate in a callback: it holds for this handshake alone.
        connection.context = current

    outer = server_context(files)
    outer.sni_callback = choose  # also called for clients that send no name
    return outer


class _NamedContext(ssl.SSLContext):
    """Checks certificates for one name, whatever host is called: workers are reached by addresses of the moment."""

    expected_name: str | None = None

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> ssl.SSLObject:
        """Wrap as the base class does, with certificates checked for `expected_name`, if there is one.

        asyncio and httpx both come through here.
        """
        if self.expected_name is not None:
            options["server_hostname"] = self.expected_name
        return super().wrap_bio(incoming, outgoing, *args, **options)


def client_context(files: ClientFiles) -> ssl.SSLContext:
    """Return the TLS context of an HTTP client: it trusts the CA, and shows the client's certificate if there is one.

    With a `server_name` certificates must bear that name, whatever host is called. InvalidSpecError names the variable
    and the file that is wrong.
    """
    context = _NamedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.expected_name = files.server_name
    if files.ca == SYSTEM_CA:
        context.load_default_certs()
    else:
        _load_roots(context, files.ca, field="MILLRACE_TLS_CA")
    if files.cert is not None and files.key is not None:
        _load_chain(context, files.cert, files.key)
    return context


def stamp_of(*paths: Path | None) -> Stamp:
    """Return a value made of the files' times, sizes and inodes: it differs when one of them has changed, came or went.

    None among the paths counts as no file.
    """

    def one(path: Path | None) -> object:
        """Return the times, size and inode of one file, "missing" if it is gone, None for no file."""
        try:
            stat = os.stat(path) if path is not None else None
        except OSError:
            return "missing"
        return None if stat is None else (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino)

    return tuple(map(one, paths))


def _load_chain(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Load a certificate chain and its unencrypted key into the context.

    InvalidSpecError names the variable and the file that cannot be read, or that the pair does not fit.
    """
    for field, path in (("MILLRACE_TLS_CERT", cert), ("MILLRACE_TLS_KEY", key)):
        _require_readable(path, field=field)
    try:
        # An empty password instead of a prompt that nobody sees.
        context.load_cert_chain(cert, key, password=lambda: b"")
    except (ssl.SSLError, OSError) as error:
        wrong = f"is no PEM certificate chain with its unencrypted key in {key}: {_reason(error)}"
        raise _wrong("MILLRACE_TLS_CERT", cert, wrong) from None


def _load_roots(context: ssl.SSLContext, path: Path, *, field: str) -> None:
    """Have the context trust the CA certificates of a PEM file.

    InvalidSpecError, naming the variable `field` and the file, if it cannot be read or has no certificate.
    """
    _require_readable(path, field=field)
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise _wrong(field, path, f"holds no PEM certificates: {_reason(error)}") from None


def _require_readable(path: Path, *, field: str) -> None:
    """Raise InvalidSpecError, naming the variable `field`, if the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise _wrong(field, path, f"cannot be read: {error.strerror or error}") from None


def _wrong(field: str, path: Path, message: str) -> InvalidSpecError:
    """Make the error for a file that is wrong: `field` is its variable, `message` says what is wrong."""
    violation = Violation(field=field, value=str(path), message=message, source="environment")
    return InvalidSpecError([violation], reason="TLS_FILE_INVALID", remedy="mount the right files and start again")


def _reason(error: OSError) -> str:
    """Return in words why a file could not be loaded: OpenSSL's reason, the system's, or the error's text."""
    return getattr(error, "reason", None) or error.strerror or str(error)


def _system_roots() -> bytes | None:
    """Return the CA certificates that the system trusts, as PEM; None lets gRPC take those that it brings."""
    path = ssl.get_default_verify_paths().cafile
    return None if path is None else Path(path).read_bytes()
