"""A private authority, and what is refused: weak, expired, mismatched, readable by others."""

from __future__ import annotations

import contextlib
import os
import shutil
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

from fedstill.deploy.coordinator.certificates import (
    CertificateError,
    Certificates,
    check_server,
    hosts_of,
    make_authority,
    make_server,
    read_certificate,
    renew,
    weaknesses,
    write_secret,
)

# openssl req -x509 -newkey ec -sha1 -days 36500: the library itself signs nothing with SHA-1 any more
SHA1 = b"""-----BEGIN CERTIFICATE-----
MIIBcTCCARigAwIBAgIUL/Nx/rVRBTBYMbNbnSU0M5zzpxEwCQYHKoZIzj0EATAO
MQwwCgYDVQQDDANvbGQwIBcNMjYxMTE2MTU1NzEwWhgPMjEyNjEwMjMxNTU3MTBa
MA4xDDAKBgNVBAMMA29sZDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABMYQ0jAW
+3eZQko/Ywh8efyNFAZvr6+ffAYM3V8ZfwZo3O0iyE4T3o7wVEqIZHjkH5r8njvx
RqUxJka/UEpyodGjUzBRMB0GA1UdDgQWBBSC+pQODM8fIx3XTDrc/v28VG4HEDAf
BgNVHSMEGDAWgBSC+pQODM8fIx3XTDrc/v28VG4HEDAPBgNVHRMBAf8EBTADAQH/
MAkGByqGSM49BAEDSAAwRQIgCoIVz4B0+LLiRODCvwZh1dPOKlyPtlqA5TzWlqBF
CIQCIQDaRGPrhxjVb9L8NjxA++lNrNMjoZtZ2sRCo1hQBfniiQ==
-----END CERTIFICATE-----
"""
HOSTS = ["coordinator.example.org", "10.0.0.1"]


def certificate(key: object, *, days: int = 10, age: int = 1, digest: object = None) -> x509.Certificate:
    """Signed by itself, with any weakness."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    return x509.CertificateBuilder(
        name, name, key.public_key(), 7, now - timedelta(days=age), now + timedelta(days=days)
    ).sign(key, digest)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_authority(tmp_path)
    make_server(tmp_path, HOSTS)
    return tmp_path


def test_a_new_authority_signs_a_server_that_openssl_trusts(folder: Path) -> None:
    files = Certificates.of(folder)
    server = check_server(files)
    assert hosts_of(server) == HOSTS
    assert server.not_valid_after_utc > datetime.now(UTC) + timedelta(days=300)
    context = ssl.create_default_context(cafile=files.authority)
    context.load_cert_chain(files.certificate, files.key)
    server.verify_directly_issued_by(read_certificate(files.authority))
    for name in ("ca.key", "server.key"):
        assert os.stat(folder / name).st_mode & 0o777 == 0o600


def test_renewing_keeps_the_authority(folder: Path) -> None:
    before = (folder / "ca.crt").read_bytes(), (folder / "server.crt").read_bytes()
    make_server(folder, ["new.example.org"])
    assert (folder / "ca.crt").read_bytes() == before[0]
    assert (folder / "server.crt").read_bytes() != before[1]
    assert hosts_of(check_server(Certificates.of(folder))) == ["new.example.org"]


def test_an_authority_is_never_replaced(folder: Path) -> None:
    with pytest.raises(CertificateError, match="there is an authority already"):
        make_authority(folder)


def test_weak_and_expired_certificates_say_why() -> None:
    good = ec.generate_private_key(ec.SECP384R1())
    assert weaknesses(certificate(good, digest=hashes.SHA384())) == []
    assert weaknesses(certificate(ed25519.Ed25519PrivateKey.generate())) == []
    short = rsa.generate_private_key(65537, 1024)
    assert weaknesses(certificate(short, digest=hashes.SHA256())) == ["its RSA key has 1024 bits; 2048 are the least"]
    small = ec.generate_private_key(ec.SECP192R1())
    assert weaknesses(certificate(small, digest=hashes.SHA256())) == ["its curve has 192 bits; 256 are the least"]
    assert "it is signed with SHA1, which can be forged" in weaknesses(x509.load_pem_x509_certificate(SHA1))
    assert "it expired on" in weaknesses(certificate(good, days=-1, age=9, digest=hashes.SHA384()))[0]
    [early] = weaknesses(certificate(good, age=-2, digest=hashes.SHA384()))
    assert "is this machine's clock right?" in early


def test_a_server_with_any_flaw_is_refused(folder: Path) -> None:
    files = Certificates.of(folder)
    os.chmod(files.key, 0o640)
    with pytest.raises(CertificateError, match=rf"mode 640\); run: chmod 600 {files.key}"):
        check_server(files)
    os.chmod(files.key, 0o600)
    other = ec.generate_private_key(ec.SECP384R1())
    secret = other.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    good = files.key.read_bytes()
    files.key.write_bytes(secret)
    with pytest.raises(CertificateError, match=r"is not the key of .*server\.crt"):
        check_server(files)
    own = certificate(other, digest=hashes.SHA384())
    files.certificate.write_bytes(own.public_bytes(serialization.Encoding.PEM))
    with pytest.raises(CertificateError, match=r"is not signed by .*ca\.crt"):
        check_server(files)
    files.key.write_bytes(good)
    old = certificate(other, days=-1, age=9, digest=hashes.SHA384())
    files.certificate.write_bytes(old.public_bytes(serialization.Encoding.PEM))
    with pytest.raises(CertificateError, match="it expired on"):
        check_server(files)
    files.certificate.write_text("nothing")
    with pytest.raises(CertificateError, match="is no PEM certificate"):
        check_server(files)


def test_an_expired_authority_signs_nothing_more(folder: Path) -> None:
    key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    old = certificate(key, days=-1, age=9, digest=hashes.SHA384())
    (folder / "ca.crt").write_bytes(old.public_bytes(serialization.Encoding.PEM))
    with pytest.raises(CertificateError, match=r"ca\.crt: it expired on"):
        make_server(folder, HOSTS)


def test_a_renewed_pair_changes_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_authority(tmp_path)
    make_server(tmp_path, ["localhost", "127.0.0.1"])
    files = Certificates.of(tmp_path)
    first = check_server(files).serial_number
    renewed = check_server(renew(tmp_path))
    assert renewed.serial_number != first
    assert hosts_of(renewed) == ["localhost", "127.0.0.1"]
    real = os.replace
    for cut in range(1, 9):  # a power cut before each of its renames
        seen = 0

        def renaming(source: object, target: object, cut: int = cut) -> None:
            nonlocal seen
            seen += 1
            if seen == cut:
                raise OSError("power cut")
            real(source, target)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", renaming)
            patch.setattr(Path, "replace", lambda self, target: renaming(self, target))
            with contextlib.suppress(OSError):
                renew(tmp_path)
        check_server(files)  # key and certificate belong together, whenever it was cut
    assert files.key.stat().st_mode & 0o077 == 0
    renew(tmp_path)
    assert len([place for place in (tmp_path / "server.pairs").iterdir() if not place.is_symlink()]) == 1


def test_a_renewed_pair_is_on_disk_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_authority(tmp_path)
    make_server(tmp_path, ["localhost"])
    done: list[tuple[str, str]] = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (done.append(("sync", os.readlink(f"/proc/self/fd/{fd}"))), sync(fd))[1]
    )
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (done.append(("replace", Path(to).name)), replace(self, to))[1]
    )
    renew(tmp_path)
    at = done.index(("replace", "current"))  # from here on the new pair is the one that is read
    assert [Path(place).name[:11] for kind, place in done[:at] if kind == "sync" and ".server." in place] == [
        ".server.key",
        ".server.crt",
    ]
    assert done[at + 1] == ("sync", str(tmp_path / "server.pairs"))


def test_a_pair_of_plain_files_is_renewed_too(tmp_path: Path) -> None:
    make_authority(tmp_path)
    files = make_server(tmp_path, ["localhost"])
    pair = files.key.read_bytes(), files.certificate.read_bytes()
    shutil.rmtree(tmp_path / "server.pairs")
    files.key.unlink(), files.certificate.unlink()
    write_secret(files.key, pair[0])
    files.certificate.write_bytes(pair[1])
    assert check_server(renew(tmp_path)).serial_number != x509.load_pem_x509_certificate(pair[1]).serial_number
