"""The sites' key pairs for Flower's node authentication, and which of them a SuperLink admits."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedstill.common.checkpoint import write_atomically
from fedstill.deploy import flower_commands as flower
from fedstill.deploy.coordinator.certificates import CertificateError, check_secret, write_secret

SITES = "fedstill-sites.json"  # beside Flower's config.toml: the names of registered keys


def new_key(path: Path, comment: str = "") -> Path:
    """Make an ECDSA pair (P-384): the private key at `path`, mode 600, never overwritten; the public key beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    write_secret(path, secret)
    public = path.with_name(f"{path.name}.pub")
    public.write_text(f"{public_half(key)} {comment}".strip() + "\n")
    return public


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a site's private key; refuse one that others on the machine can read or Flower cannot use."""
    check_secret(path)
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise CertificateError(
            f"{path}: is no OpenSSH private key without a password; make one: fedstill keys new {path}"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{path}: Flower takes ECDSA keys only; make one: fedstill keys new {path}")
    return key


def public_half(key: ec.EllipticCurvePrivateKey) -> str:
    """Return the public key as the coordinator registers it."""
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return public.decode()


def fingerprint(public: str) -> str:
    """Return the fingerprint that `ssh-keygen -l` shows, short enough to read out on the phone."""
    try:
        raw = base64.b64decode(public.split()[1], validate=True)
    except (IndexError, ValueError):
        raise CertificateError("this is no OpenSSH public key; it begins with ecdsa-sha2-nistp384") from None
    return "SHA256:" + base64.b64encode(hashlib.sha256(raw).digest()).decode().rstrip("=")


# --- which keys a SuperLink admits; Flower keeps no names, so a file beside its config.toml does ---


def rotate(public: Path, name: str, connection: str, env: Mapping[str, str]) -> int:
    """Let a site's new key in, then shut its old ones out: cut off in between, both open, and it can be run again."""
    old = [number for number, entry in _book(connection, env).items() if entry["name"] == name]
    if not old:
        raise CertificateError(f"there is no site {name!r} at {connection}: fedstill keys register {public} {name}")
    if fingerprint(public.read_text()) in {_book(connection, env)[number]["fingerprint"] for number in old}:
        number = next(n for n in old if _book(connection, env)[n]["fingerprint"] == fingerprint(public.read_text()))
    else:
        number = str(register(public, name, connection, env, again=True))
    for other in old:
        if other != number:
            revoke(other, connection, env)
    return int(number)


def register(public: Path, name: str, connection: str, env: Mapping[str, str], again: bool = False) -> int:
    """Run `flwr supernode register`, and keep the site's name; a name has one key unless it is registered `again`."""
    try:
        text = public.read_text()
    except OSError as error:
        raise CertificateError(f"{public}: cannot be read ({error.strerror}); give the site's .pub file") from None
    if "PRIVATE KEY" in text:
        raise CertificateError(f"{public}: is a private key, which must never leave its site; register the .pub file")
    shown, book = fingerprint(text), _book(connection, env)
    for node, entry in book.items():
        if (entry["name"], entry["fingerprint"]) == (name, shown):
            return int(node)  # the very key that it has: a script may say so twice
    if not again and name in {entry["name"] for entry in book.values()}:
        raise CertificateError(f"a site {name!r} is registered already; revoke it first: fedstill keys revoke {name}")
    with tempfile.NamedTemporaryFile("w", suffix=".pub") as copy:  # /dev/stdin works too: it can be read only once
        copy.write(text)
        copy.flush()
        answer = flower.call(["supernode", "register", copy.name, connection, "--name", name, "--format", "json"], env)
    number = int(answer["node-id"])
    book[str(number)] = {"name": name, "fingerprint": shown, "registered": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"}
    _write_book(connection, env, book)
    return number


def fingerprint_of(number: int, connection: str, env: Mapping[str, str]) -> str:
    """Return the fingerprint of a key registered from here, by its node number."""
    return _book(connection, env)[str(number)]["fingerprint"]


def registered(connection: str, env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run `flwr supernode list`, and add the names and fingerprints that were kept."""
    answer, book = flower.call(["supernode", "list", connection, "--format", "json"], env), _book(connection, env)
    rows = []
    for node in [node for node in answer.get("nodes", []) if node["status"] != "unregistered"]:
        number = str(node["node-id"])
        known = book.get(number, {})
        rows.append(
            {
                "name": known.get("name"),
                "status": node["status"],
                "node": number,
                "fingerprint": known.get("fingerprint"),
                "registered": known.get("registered"),
            }
        )
    return rows


def revoke(name: str, connection: str, env: Mapping[str, str]) -> int:
    """Run `flwr supernode unregister` by the site's name or node number: its key is void from now on."""
    book = _book(connection, env)
    numbers = [number for number, entry in book.items() if name in (number, entry["name"])]
    if not numbers and not name.isdigit():
        known = ", ".join(sorted(entry["name"] for entry in book.values())) or "none"
        raise CertificateError(f"there is no site {name!r} at {connection}; registered from here: {known}")
    number = numbers[0] if numbers else name
    flower.call(["supernode", "unregister", number, connection, "--format", "json"], env)
    book.pop(number, None)
    _write_book(connection, env, book)
    return int(number)


def _book_path(env: Mapping[str, str]) -> Path:
    return Path(env.get("FLWR_HOME") or Path(os.path.expanduser("~")) / ".flwr") / SITES


def _book(connection: str, env: Mapping[str, str]) -> dict[str, dict[str, str]]:
    path = _book_path(env)
    return dict(json.loads(path.read_text()).get(connection, {})) if path.exists() else {}


def _write_book(connection: str, env: Mapping[str, str], book: Mapping[str, Any]) -> None:
    path = _book_path(env)
    path.parent.mkdir(parents=True, exist_ok=True)
    books = json.loads(path.read_text()) if path.exists() else {}
    write_atomically(path, json.dumps({**books, connection: dict(book)}, indent=1))
