"""TLS between the driver and its tasks, if Spark encrypts its own connections.

The driver makes a certificate for one run. A task gets it with its order, through Spark, and trusts no other.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from millpond.errors import MissingDriver

NAME = "driver.millpond"
"""Name of the driver in its certificate. Its address does not matter: the certificate itself is known."""
_SETTINGS = (
    *("spark.network.crypto.enabled", "spark.authenticate.enableSaslEncryption"),
    *("spark.ssl.enabled", "spark.ssl.rpc.enabled"),
)
_VALID = timedelta(days=3650)
"""A run may last for years. Nothing but its tasks trusts the certificate."""


def is_wanted(setting: Callable[[str, str], str]) -> bool:
    """Whether Spark encrypts its own connections; `setting(name, default)` reads its configuration."""
    return any(setting(name, "false").lower() == "true" for name in _SETTINGS)


def server_context() -> tuple[ssl.SSLContext, str]:
    """The driver's context, and its new certificate for the tasks."""
    certificate, key = _certificate()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with TemporaryDirectory() as folder:  # private; the ssl module reads keys from files only
        file = Path(folder) / "driver.pem"
        file.touch(0o600)
        file.write_text(key + certificate)
        context.load_cert_chain(file)
    return context, certificate


def task_context(certificate: str) -> ssl.SSLContext:
    """A context that trusts this certificate only."""
    return ssl.create_default_context(cadata=certificate)


def _certificate() -> tuple[str, str]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ModuleNotFoundError as e:
        raise MissingDriver(
            f"Spark encrypts its connections, and for the same between driver and tasks the package {e.name} is "
            'missing; install it with: pip install "millpond[spark]"'
        ) from e
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.now(UTC)
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign"), False
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks differ
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(own, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), critical=False)
        .add_extension(
            x509.KeyUsage(
                digital_signature=True, key_cert_sign=True, encipher_only=False, decipher_only=False, **usage
            ),
            critical=True,
        )
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode()
