"""A site's signature under its keys for a secure sum, so that nobody between the sites can put keys of his own there.

The coordinator carries the keys from site to site. One that exchanged them would pose to each site as all the others
and see its part. Who has the other owners' public keys (`peers` in site.toml) takes only keys that these have signed.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedstill.common.config import SiteFile

if TYPE_CHECKING:
    from fedstill.client.node import Node

HASH = ec.ECDSA(hashes.SHA384())
log = logging.getLogger("flwr")


def signature(site: Node, keys: bytes) -> str:
    """Sign keys for the sum of this Ask with the site's own key; a site without one says nothing."""
    own = site.site
    if not isinstance(own, SiteFile) or own.private_key is None:
        return ""
    private = serialization.load_ssh_private_key(own.private_key.read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)  # fedstill keys new makes no other, and Flower takes none
    return base64.b64encode(private.sign(_said(site, site.name, keys), HASH)).decode()


def unsigned(site: Node, keys: Mapping[str, bytes], signatures: Sequence[str]) -> list[str]:
    """Return the sites whose keys are not signed by who they should be; none where this site has no `peers`."""
    own = site.site
    if not isinstance(own, SiteFile) or own.peers is None:
        return []
    signed = dict(zip(keys, [*signatures, *[""] * len(keys)], strict=False))
    strange = [name for name in keys if name != site.name and not _is_signed(site, own.peers, name, keys, signed)]
    for name in strange:
        log.warning(
            "site %s: the keys that the coordinator gave for %s are not signed by %s; nothing is summed with them. Get "
            "%s.pub from its owner, or ask who exchanged the keys",
            site.name, name, own.peers / f"{name}.pub", name,
        )  # fmt: skip
    return strange


def _is_signed(site: Node, peers: Path, name: str, keys: Mapping[str, bytes], signed: Mapping[str, str]) -> bool:
    try:
        public = serialization.load_ssh_public_key((peers / f"{name}.pub").read_bytes())
        if not isinstance(public, ec.EllipticCurvePublicKey):
            return False
        public.verify(base64.b64decode(signed[name]), _said(site, name, keys[name]), HASH)
    except (OSError, ValueError, UnsupportedAlgorithm, InvalidSignature):
        return False
    return True


def _said(site: Node, name: str, keys: bytes) -> bytes:
    """What is signed: keys of another site, run or step are not these."""
    facts = {"keys of a secure sum": keys.hex(), "site": name, "run": site.folder.name, "place": list(site.place)}
    return json.dumps(facts).encode()
