"""Keys and certificates for tests, made when they are asked for."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def key_pair(folder: Path, name: str = "key", curve: ec.EllipticCurve | None = None, password: str = "") -> Path:
    """Writes NAME.pem, a private key, and NAME.pub.pem; returns the path of the first."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    secret = form.BestAvailableEncryption(password.encode()) if password else form.NoEncryption()
    private = folder / f"{name}.pem"
    private.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, secret))
    public(private).write_bytes(
        key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    )
    return private


def public(private: Path) -> Path:
    return private.with_suffix(".pub.pem")


def certificate(folder: Path, name: str, key: Path, issuer: str = "", *, signs: bool = False, years: int = 1) -> Path:
    """Writes NAME.crt.pem, of `key`, by the certificate of that name in `folder` and its key (by itself: none).

    signs: whether it may sign certificates; years: how long it is valid, negative when it no longer is.
    """
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    above = x509.load_pem_x509_certificate((folder / f"{issuer}.crt.pem").read_bytes()) if issuer else None
    secret: Any = form.load_pem_private_key((folder / f"{issuer or name}.pem").read_bytes(), None)
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    until = now + datetime.timedelta(days=365 * years)
    usage = dict.fromkeys(
        "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only".split(), False
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(above.subject if above else subject)
        .public_key(form.load_pem_public_key(public(key).read_bytes()))  # type: ignore[arg-type]
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, until) - datetime.timedelta(days=1))
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=signs, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **usage), critical=True
        )
    )
    path = folder / f"{name}.crt.pem"
    path.write_bytes(builder.sign(secret, hashes.SHA256()).public_bytes(form.Encoding.PEM))
    return path
