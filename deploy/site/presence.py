"""One SuperNode per site: a second is refused here, and a killed one is signed off so that its successor is admitted.

A SuperLink counts a killed SuperNode as present until its heartbeats have been missing for a minute, and refuses the
same key meanwhile. The holder of the key and the site's lock may report that the old one is gone.
"""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path

import grpc
from cryptography.hazmat.primitives.asymmetric import ec

from fedstill.common.checkpoint import write_atomically
from fedstill.common.config import SiteFile
from fedstill.common.lock import only_one
from fedstill.deploy.coordinator.keys import fingerprint, public_half, read_key
from fedstill.deploy.flower_internals import (
    HEARTBEAT_DEFAULT_INTERVAL,
    ActivateNodeRequest,
    DeactivateNodeRequest,
    FleetStub,
    public_key_to_bytes,
)
from fedstill.deploy.site.probe import signed


class SiteBusy(ValueError):
    """Another SuperNode of this site runs on this machine."""


def only_client(state: Path) -> contextlib.AbstractContextManager[None]:
    """Hold the site's lock."""
    cure = "end it first, or give this site a name and a state folder of its own"
    return only_one(
        state / "running.lock", SiteBusy(f"a flower-client with the state folder {state} runs already; {cure}")
    )


def sign_off(site: SiteFile, state: Path) -> bool:
    """Tell the SuperLink that this site's last SuperNode is gone; return whether the next one can be admitted."""
    if site.superlink is None or site.root_certificates is None or site.private_key is None:
        return False
    key = read_key(site.private_key)
    known = state / "node.json"
    with grpc.secure_channel(
        site.superlink, grpc.ssl_channel_credentials(site.root_certificates.read_bytes())
    ) as channel:
        fleet = FleetStub(channel)
        try:
            node = _node(known, key)
            if node is None or not _away(fleet, key, node):
                node = _number(fleet, key)
                write_atomically(known, json.dumps({"key": fingerprint(public_half(key)), "node": node}))
                return _away(fleet, key, node)
        except grpc.RpcError as error:
            logging.getLogger("flwr").warning(
                "the SuperLink could not be told that this site begins anew: %s", error.details()
            )
            return False
    return True


def _node(known: Path, key: ec.EllipticCurvePrivateKey) -> int | None:
    """Return the node number that the SuperLink gave this key, if this site has kept it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        remembered = json.loads(known.read_text())
        return int(remembered["node"]) if remembered["key"] == fingerprint(public_half(key)) else None
    return None


def _number(fleet: FleetStub, key: ec.EllipticCurvePrivateKey) -> int:
    """Ask the SuperLink for that number, which it gives to a node that it activates."""
    request = ActivateNodeRequest(
        public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
    )
    return int(fleet.ActivateNode(request, metadata=signed(key), timeout=10).node_id)


def _away(fleet: FleetStub, key: ec.EllipticCurvePrivateKey, node: int) -> bool:
    """Deactivate the node; return whether the SuperLink now counts it as absent, or did already."""
    try:
        fleet.DeactivateNode(DeactivateNodeRequest(node_id=node), metadata=signed(key), timeout=10)
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:  # the key was registered again, under another number
            return False
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise
    return True
