"""The coordinator's signature under what sites' ledgers had come to, with the key of its stream."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

HASH = ec.ECDSA(hashes.SHA384())


def signature(key: Path, run: str, number: int, heads: Mapping[str, str]) -> str | None:
    """Sign the heads of a round; None if the stream's key is none that signs so."""
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        return None
    return base64.b64encode(private.sign(_said(run, number, heads), HASH)).decode()


def is_signed(certificate: Path, signed: str, run: str, number: int, heads: Mapping[str, str]) -> bool:
    """Return whether the holder of this certificate's key signed these heads."""
    public = x509.load_pem_x509_certificate(certificate.read_bytes()).public_key()
    try:
        if not isinstance(public, ec.EllipticCurvePublicKey):
            return False
        public.verify(base64.b64decode(signed), _said(run, number, heads), HASH)
    except (InvalidSignature, ValueError):
        return False
    return True


def _said(run: str, number: int, heads: Mapping[str, str]) -> bytes:
    return json.dumps({"run": run, "round": number, "heads": dict(sorted(heads.items()))}).encode()
