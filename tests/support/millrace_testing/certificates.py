"""Certificates for tests: authorities, leaves for 127.0.0.1 and localhost, expired ones, by `cryptography`."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate and its key, as PEM files."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority; `path` is its certificate."""

    def __init__(self, directory: Path, name: str = "test-ca") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name, self._key, days=30)
        self._cert = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(
            self._key, hashes.SHA256()
        )
        self.path = directory / f"{name}.pem"
        self.path.write_bytes(self._cert.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, days: float = 10, hosts: tuple[str, ...] = ("localhost", "127.0.0.1")) -> Pair:
        """Return a leaf for `hosts`, valid from 20 days ago until in `days`; negative days: it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        cert = self._builder(subject, key, days=days).add_extension(names, critical=False)
        pair = Pair(cert=self._directory / f"{name}.crt", key=self._directory / f"{name}.key")
        pair.cert.write_bytes(cert.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, days: float) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 20 * _DAY)
            .not_valid_after(now + days * _DAY)
        )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
