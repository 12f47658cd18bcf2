"""What a site can learn of its SuperLink before it joins: reachable, trusted, the clock, whether its key is known.

Node authentication signs the time, and the SuperLink accepts it only from 5 s ahead to 305 s behind its own clock.
Calls with times a little before and after this machine's own show where that window lies, and so how far the clocks
differ.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fedstill.deploy.coordinator.certificates import weaknesses
from fedstill.deploy.flower_internals import (
    PUBLIC_KEY_HEADER,
    SIGNATURE_HEADER,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    ActivateNodeRequest,
    FleetStub,
    now,
    public_key_to_bytes,
    sign_message,
)

FARTHEST = 3600.0  # seconds to either side in which the SuperLink's clock is searched
STEP = 150.0  # half of the window that it accepts
NEAR = 1.0


class ProbeError(RuntimeError):
    """The SuperLink does not meet this site's needs; the text says how."""


def split(address: str) -> tuple[str, int]:
    """Split `host:port` or `[::1]:port` into host and port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def reach(address: str, seconds: float = 5.0) -> str:
    """Open a connection and close it again; return the address that answered."""
    host, port = split(address)
    try:
        with socket.create_connection((host, port), seconds) as connection:
            return str(connection.getpeername()[0])
    except socket.gaierror:
        raise ProbeError(f"the name {host} is not known here") from None
    except OSError as error:
        raise ProbeError(f"{address}: {error.strerror or 'no answer'}") from None


def handshake(address: str, authority: Path, seconds: float = 5.0) -> x509.Certificate:
    """Return the SuperLink's certificate if this authority vouches for it and it is neither weak nor expired."""
    host, port = split(address)
    context = ssl.create_default_context(cafile=authority)
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), seconds) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            shown = secured.getpeercert(binary_form=True)
    except ssl.SSLCertVerificationError as error:
        raise ProbeError(f"{address}: its certificate is not trusted ({error.verify_message})") from None
    except ssl.SSLError as error:
        raise ProbeError(f"{address}: does not speak TLS ({error.reason})") from None
    except OSError as error:
        raise ProbeError(f"{address}: {error.strerror or 'no answer'}") from None
    certificate = x509.load_der_x509_certificate(shown or b"")
    reasons = weaknesses(certificate)
    if reasons:
        raise ProbeError(f"{address}: its certificate must not be used: {'; '.join(reasons)}")
    return certificate


@dataclass(frozen=True)
class Answer:
    """How the SuperLink answered a signed call."""

    in_time: bool
    known: bool
    said: str = field(default="", compare=False)


def signed(key: ec.EllipticCurvePrivateKey, ahead: float = 0.0) -> tuple[tuple[str, str | bytes], ...]:
    """Return the metadata of Flower's node authentication: the key, the time, and the signed time."""
    time = (now() + timedelta(seconds=ahead)).isoformat()
    return (
        (PUBLIC_KEY_HEADER, public_key_to_bytes(key.public_key())),
        (TIMESTAMP_HEADER, time),
        (SIGNATURE_HEADER, sign_message(key, time.encode("ascii"))),
    )


def knock(address: str, authority: Path, key: ec.EllipticCurvePrivateKey, ahead: float = 0.0) -> Answer:
    """Make one signed call that changes nothing, its time `ahead` of this machine's clock.

    It asks for activation with an interval that no SuperLink accepts. The interval is refused only after the key was
    looked up, so any other refusal means that the key is not registered.
    """
    public = public_key_to_bytes(key.public_key())
    metadata = signed(key, ahead)
    credentials = grpc.ssl_channel_credentials(authority.read_bytes())
    with grpc.secure_channel(address, credentials) as channel:
        call = FleetStub(channel).ActivateNode
        try:
            call(ActivateNodeRequest(public_key=public, heartbeat_interval=-1.0), metadata=metadata, timeout=10)
        except grpc.RpcError as error:
            return _understood(error)
    raise ProbeError("the SuperLink let this site in with an interval that it should have refused")


def _understood(error: grpc.RpcError) -> Answer:
    code, details = error.code(), str(error.details())
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED):
        raise ProbeError(f"the SuperLink does not answer as one of Flower's: {details}") from None
    if code == grpc.StatusCode.UNAUTHENTICATED and "timestamp" in details.lower():
        return Answer(in_time=False, known=False, said=details)
    return Answer(in_time=True, known="heartbeat" in details.lower(), said=details)


def clock_ahead(in_time: Callable[[float], bool]) -> float | None:
    """Return how many seconds the SuperLink's clock is ahead of this one; None if more than an hour away.

    `in_time(d)` tells whether a time d seconds ahead of this machine's clock is accepted.
    """
    tries = [0.0]
    for number in range(1, int(FARTHEST / STEP) + 1):
        tries += [number * STEP, -number * STEP]
    taken = next((ahead for ahead in tries if in_time(ahead)), None)
    if taken is None:
        return None
    late = taken + 2 * STEP + 4 * SYSTEM_TIME_TOLERANCE  # surely beyond the window
    while late - taken > NEAR:
        middle = (late + taken) / 2
        taken, late = (middle, late) if in_time(middle) else (taken, middle)
    return taken - SYSTEM_TIME_TOLERANCE
