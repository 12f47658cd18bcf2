"""A private certificate authority and server certificates; weak or expired certificates are refused."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedstill.common.checkpoint import sync_folder, write_atomically
from fedstill.common.config import LONGEST_NAME, NAME

DAYS = 365
AUTHORITY_DAYS = 3650


class CertificateError(ValueError):
    """A certificate or key that must not be used; the text says why and what to do."""


@dataclass(frozen=True)
class Certificates:
    """Paths of the authority's certificate and the server's certificate and key."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def of(cls, folder: Path) -> Certificates:
        """Use the file names that `make_certificates` and `fedstill certs` give."""
        return cls(folder / "ca.crt", folder / "server.crt", folder / "server.key")


def make_certificates(folder: Path, hosts: tuple[str, ...] = ("localhost", "127.0.0.1")) -> Certificates:
    """Make an authority and a server certificate for `hosts`; the authority's key is not kept."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    authority = _authority(key, DAYS)
    (folder / "ca.crt").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    return _write_server(folder, authority, key, hosts, DAYS)


def make_authority(folder: Path, days: int = AUTHORITY_DAYS) -> Path:
    """Make an authority whose key stays in `folder` (ca.key, mode 600); an existing one is never replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "ca.key").exists() or (folder / "ca.crt").exists():
        raise CertificateError(f"{folder}: there is an authority already; every site would have to get a new ca.crt")
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(folder / "ca.key", _pem(key))
    (folder / "ca.crt").write_bytes(_authority(key, days).public_bytes(serialization.Encoding.PEM))
    return folder / "ca.crt"


def make_server(folder: Path, hosts: Sequence[str], days: int = DAYS) -> Certificates:
    """Make a key and certificate for the server, signed by the authority in `folder`; also renews an old pair."""
    if not hosts:
        raise CertificateError("no host: name every address under which sites reach the coordinator, with --host")
    authority, key = _authority_in(folder)
    days = min(days, (authority.not_valid_after_utc - datetime.now(UTC)).days)
    return _write_server(folder, authority, key, hosts, days)


def make_site(folder: Path, name: str, public: Path, days: int = DAYS) -> Path:
    """Certify a site's public key (OpenSSH) under its name, signed by the authority in `folder`: sites/NAME.crt."""
    if not re.fullmatch(NAME, name) or len(name) > LONGEST_NAME:
        raise CertificateError(f"{name!r} is no name of a site: letters, digits, _ . and - only, 64 of them at most")
    authority, signing = _authority_in(folder)
    try:
        key = serialization.load_ssh_public_key(public.read_bytes())
    except OSError as error:
        raise CertificateError(f"{public}: cannot be read ({error.strerror}); give the site's .pub file") from None
    except (ValueError, UnsupportedAlgorithm):
        raise CertificateError(f"{public}: is no OpenSSH public key; give the site's .pub file") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise CertificateError(f"{public}: Flower takes ECDSA keys only; make one: fedstill keys new")
    days = min(days, (authority.not_valid_after_utc - datetime.now(UTC)).days)
    certificate = (
        _builder(_name(name), authority.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        .sign(signing, hashes.SHA384())
    )
    (folder / "sites").mkdir(exist_ok=True)
    write_atomically(folder / "sites" / f"{name}.crt", certificate.public_bytes(serialization.Encoding.PEM))
    return folder / "sites" / f"{name}.crt"


def _authority_in(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return the authority's certificate and key, if they are valid together."""
    key_file = folder / "ca.key"
    check_secret(key_file)
    authority = read_certificate(folder / "ca.crt")
    _refuse(folder / "ca.crt", weaknesses(authority))
    key = serialization.load_pem_private_key(key_file.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != authority.public_key():
        raise CertificateError(
            f"{key_file} is not the key of {folder / 'ca.crt'}; put the two that belong together here"
        )
    return authority, key


def renew(folder: Path, days: int = DAYS) -> Certificates:
    """Renew the server's key and certificate for the hosts that it has; both change at once, or neither does."""
    return make_server(folder, hosts_of(read_certificate(Certificates.of(folder).certificate)), days)


def read_certificate(path: Path) -> x509.Certificate:
    """Read the first certificate of a PEM file."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise CertificateError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except ValueError:
        raise CertificateError(f"{path}: is no PEM certificate; it begins with -----BEGIN CERTIFICATE-----") from None


def weaknesses(certificate: x509.Certificate, now: datetime | None = None) -> list[str]:
    """List why a certificate must not be trusted: its key, its signature, its dates. Empty if it may be."""
    now, key = now or datetime.now(UTC), certificate.public_key()
    reasons: list[str] = []
    if isinstance(key, rsa.RSAPublicKey) and key.key_size < 2048:
        reasons.append(f"its RSA key has {key.key_size} bits; 2048 are the least")
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.key_size < 256:
        reasons.append(f"its curve has {key.curve.key_size} bits; 256 are the least")
    if isinstance(key, dsa.DSAPublicKey):
        reasons.append("its key is DSA, which is not used any more")
    signed = certificate.signature_hash_algorithm  # none for Ed25519, which has its own
    if isinstance(signed, (hashes.SHA1, hashes.MD5)):
        reasons.append(f"it is signed with {signed.name.upper()}, which can be forged")
    if now > certificate.not_valid_after_utc:
        reasons.append(f"it expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    if now < certificate.not_valid_before_utc:
        reasons.append(
            f"it is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on; is this machine's clock right?"
        )
    return reasons


def check_server(files: Certificates) -> x509.Certificate:
    """Return the server's certificate if it, its key and its authority are valid together."""
    authority, server = read_certificate(files.authority), read_certificate(files.certificate)
    _refuse(files.authority, weaknesses(authority))
    _refuse(files.certificate, weaknesses(server))
    check_secret(files.key)
    try:
        key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    except (ValueError, TypeError):
        raise CertificateError(
            f"{files.key}: is no PEM key without a password; make one: fedstill certs server"
        ) from None
    if key.public_key() != server.public_key():
        raise CertificateError(
            f"{files.key} is not the key of {files.certificate}; put the two that belong together here"
        )
    try:
        server.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        raise CertificateError(
            f"{files.certificate} is not signed by {files.authority}; make it: fedstill certs server"
        ) from None
    if not hosts_of(server):
        raise CertificateError(f"{files.certificate} names no host (subjectAltName); make it: fedstill certs server")
    return server


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """Return the names and addresses that a certificate is valid for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def check_secret(path: Path) -> None:
    """Refuse a private key that is missing or that others on this machine can read."""
    try:
        mode = path.stat().st_mode & 0o777
    except OSError as error:
        raise CertificateError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    if mode & 0o077:
        raise CertificateError(f"{path}: others can read this private key (mode {mode:03o}); run: chmod 600 {path}")
    if not os.access(path, os.R_OK):
        raise CertificateError(f"{path}: this user cannot read it; run as its owner")


def write_secret(path: Path, content: bytes, *, replace: bool = False) -> None:
    """Write a private key that only its owner can read; an existing one is overwritten only on request."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if replace else os.O_EXCL)
    try:
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)
    except FileExistsError:
        raise CertificateError(
            f"{path}: is there already, and a private key is never overwritten; move it away"
        ) from None


def _refuse(path: Path, reasons: list[str]) -> None:
    if reasons:
        raise CertificateError(f"{path}: {'; '.join(reasons)}. Make a new one: fedstill certs")


def _authority(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    name = _name("fedstill authority")
    return (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def _write_server(
    folder: Path, authority: x509.Certificate, signing: ec.EllipticCurvePrivateKey, hosts: Sequence[str], days: int
) -> Certificates:
    key = ec.generate_private_key(ec.SECP384R1())
    server = (
        _builder(_name(hosts[0]), authority.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        .sign(signing, hashes.SHA384())
    )
    _switch(folder, "server", _pem(key), server.public_bytes(serialization.Encoding.PEM))
    return Certificates.of(folder)


def _switch(folder: Path, name: str, key: bytes, certificate: bytes) -> None:
    """Replace a key and its certificate at once: both are links into a folder, and one rename changes the folder.

    A reader or a power cut in between meets the old pair or the new one, never a key with another certificate.
    """
    pairs, current = folder / f"{name}.pairs", folder / f"{name}.pairs" / "current"
    files = {f"{name}.key": key, f"{name}.crt": certificate}
    if not current.is_symlink() and all((folder / file).is_file() for file in files):  # made before there were links
        _link(current, _pair(pairs, {file: (folder / file).read_bytes() for file in files}))
        for file in files:
            _link(folder / file, f"{name}.pairs/current/{file}")
    _link(current, _pair(pairs, files))
    for file in files:
        _link(folder / file, f"{name}.pairs/current/{file}")
    for old in pairs.iterdir():
        if not old.is_symlink() and old.name != current.readlink().name:
            shutil.rmtree(old, ignore_errors=True)


def _pair(pairs: Path, files: dict[str, bytes]) -> str:
    """Write a pair into a folder of its own, synced; return the folder's name."""
    pairs.mkdir(exist_ok=True, mode=0o700)
    place = Path(tempfile.mkdtemp(dir=pairs))
    for file, content in files.items():
        write_atomically(place / file, content, 0o600 if file.endswith(".key") else 0o666)
    return place.name


def _link(link: Path, target: str) -> None:
    """Make a symbolic link, or change one, by a rename that is on disk when this returns."""
    draft = link.with_name(f".{link.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    draft.replace(link)
    sync_folder(link.parent)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=days))
    )
