"""A certificate authority that nobody trusts, and what it signed for this machine."""

import datetime
import ipaddress
import ssl
from pathlib import Path
from typing import NamedTuple

import pytest


class Authority(NamedTuple):
    """`certificate` is a file for SSL_CERT_FILE, `context` that of servers here."""

    certificate: Path
    context: ssl.SSLContext


def authority_in(folder: Path) -> Authority:
    """Make an authority, and a certificate for `localhost` and 127.0.0.1, valid for a day."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "an authority of tests")])
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    chain = []
    for number, subject, subject_key, extension in (
        (1, issuer, authority_key, x509.BasicConstraints(ca=True, path_length=None)),
        (2, x509.Name([]), key, x509.SubjectAlternativeName(names)),
    ):
        builder = x509.CertificateBuilder(issuer, subject, subject_key.public_key(), number)
        builder = builder.not_valid_before(now - day).not_valid_after(now + day)
        signed = builder.add_extension(extension, critical=True).sign(
            authority_key, hashes.SHA256()
        )
        chain.append(signed.public_bytes(serialization.Encoding.PEM))
    (folder / "authority.pem").write_bytes(chain[0])
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "server.pem").write_bytes(private + chain[1])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    return Authority(folder / "authority.pem", context)
