"""Secure sums at a site. Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving ML", CCS 2017.

Before an answer that is to be summed, sites agree on pairwise masks through the coordinator; each sends its answer in
fixed point under all its masks; in the sum they cancel. A site that drops out leaves its masks in the sum: enough of
the others together hold the shares from which they are made. The coordinator learns the weighted sum and no part of it.

Masks follow from all that a site was told of the sum (who is in it, with which keys and weights), so that they cancel
only if every site was told the same.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedstill.common.maths.ensemble import softmax
from fedstill.common.maths.masking import WIDTH, expand, split, to_fixed
from fedstill.common.wire import Arrays, Ask, Facts, WireError
from fedstill.common.wire.typed import Message
from fedstill.strategies.secure_sum.signed_keys import signature, unsigned
from fedstill.strategies.verbs import NOTHING, Nothing, Shield, site_verb

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedstill.client.node import Node
    from fedstill.common.states import State

FEWEST = 3  # sites: of two, each can tell the other's part from the sum
SEALED = 2 * WIDTH + 16  # bytes of two shares and their seal
Of = Literal["values", "probabilities"]


@dataclass(frozen=True)
class Summed:
    """What is summed of an answer: its fractions as they are, or its logits' probabilities; and by what weights."""

    of: Of
    weights: Mapping[str, float] | Literal["size", "uniform"] = "size"


def summed(ask: Ask, of: Of, weights: Mapping[str, float] | Literal["size", "uniform"] = "size") -> Ask:
    """Return the Ask, of whose answers the weighted sum suffices; it matters in runs with `exchange.secure`."""
    return replace(ask, sum=Summed(of, weights))


# --- what the halves say to each other ---


@dataclass(frozen=True)
class Keys(Message):
    """Two public keys of a site for one sum: of the channel to others, and of its masks; signed if it has a key."""

    channel: np.ndarray
    mask: np.ndarray
    signature: str = ""


@dataclass(frozen=True)
class Peers(Message):
    """The sites of a sum, their weights, public keys and signatures, row by row; how many must be left to open it."""

    names: list[str]
    threshold: int
    weights: list[float]
    channel: np.ndarray
    mask: np.ndarray
    signatures: list[str] = field(default_factory=list)

    def told(self) -> bytes:
        """Return the hash of what a sum is of, in which every mask of it takes part."""
        facts = json.dumps([self.names, self.threshold, self.weights]).encode()
        return sha256(facts + self.channel.tobytes() + self.mask.tobytes()).digest()


@dataclass(frozen=True)
class Sealed(Message):
    """Shares of a site's two secrets, a row for each site, sealed for it; or whose keys it does not take."""

    sealed: np.ndarray
    strangers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Open(Message):
    """Who answered, and what the others sealed for this site, row by row."""

    alive: list[str]
    sealed: np.ndarray


@dataclass(frozen=True)
class Opened(Message):
    """A share of each site: of its own mask if it answered, else of the masks that it has with others."""

    shares: np.ndarray


# --- the site's half ---


@dataclass
class Masking:
    """A site's secrets for one sum; they live in memory and serve once."""

    channel: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)
    mask: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)
    own: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    peers: Peers | None = None
    shares: dict[int, tuple[int, int]] = field(default_factory=dict)  # this site's shares of its own two secrets
    used: bool = False

    def place(self, name: str) -> int:
        """Return this site's row."""
        assert self.peers is not None
        return self.peers.names.index(name)

    def masks(self, name: str, label: str, count: int) -> np.ndarray:
        """Return the sum of all masks of this site for an array."""
        assert self.peers is not None
        me, total, told = self.place(name), expand(self.own, label, count), self.peers.told()
        for row in range(len(self.peers.names)):
            if row != me:
                pair = expand(agreed(self.mask, self.peers.mask[row], told), label, count)
                total = total + pair if me < row else total - pair
        return total


PROTOCOL = ("query.keys", "query.shares", "query.unmask")  # not steps of a method: no draw depends on them


@site_verb("query.keys", leaves=NOTHING, phase=None, quick=True, shield=Shield(("channel", "mask", "signature")))
def make_keys(site: Node, nothing: Nothing) -> Keys:
    """Two fresh public keys for one sum."""
    site.masking = Masking()
    channel, mask = _public(site.masking.channel), _public(site.masking.mask)
    return Keys(channel, mask, signature(site, bytes(channel) + bytes(mask)))


@site_verb("query.shares", leaves=NOTHING, phase=None, quick=True, shield=Shield(("sealed", "strangers")))
def share_secrets(site: Node, peers: Peers) -> Sealed:
    """Shares of this site's two secrets, sealed for each of the others."""
    masking = site.masking
    if masking is None or masking.peers is not None:
        raise WireError("keys for a sum come first, and serve once")
    count = len(peers.names)
    if len(set(peers.names)) != count or site.name not in peers.names or count < max(FEWEST, site.site.limits.fewest):
        raise WireError(f"a sum of {count} sites would not hide this site's part")
    if not count // 2 < peers.threshold <= count:
        raise WireError(f"{peers.threshold} of {count} sites could open two different sums")
    if peers.channel.shape != (count, 32) or peers.mask.shape != (count, 32) or peers.mask.dtype != np.uint8:
        raise WireError("public keys are 32 bytes for each site")
    me = peers.names.index(site.name)
    mine = (bytes(_public(masking.mask)), bytes(_public(masking.channel)))
    if (bytes(peers.mask[me]), bytes(peers.channel[me])) != mine:
        raise WireError("the keys given as this site's are not the ones that it made")
    _check_weights(site, peers, me)
    keys = {name: bytes(peers.channel[row]) + bytes(peers.mask[row]) for row, name in enumerate(peers.names)}
    if strangers := unsigned(site, keys, peers.signatures):
        site.masking = None
        return Sealed(np.zeros((count, SEALED), np.uint8), strangers)
    masking.peers = peers
    holders = range(1, count + 1)
    own = split(int.from_bytes(masking.own), holders, peers.threshold)
    mask = split(int.from_bytes(masking.mask.private_bytes_raw()), holders, peers.threshold)
    masking.shares = {me: (own[me + 1], mask[me + 1])}
    sealed = np.zeros((count, SEALED), np.uint8)
    for row in range(count):
        if row != me:
            both = own[row + 1].to_bytes(WIDTH) + mask[row + 1].to_bytes(WIDTH)
            key = agreed(masking.channel, peers.channel[row], peers.told())
            sealed[row] = np.frombuffer(ChaCha20Poly1305(key).encrypt(_nonce(me, row), both, None), np.uint8)
    return Sealed(sealed)


def _check_weights(site: Node, peers: Peers, me: int) -> None:
    """Refuse a sum that is this site's part and next to nothing else."""
    weights, limits = peers.weights, site.site.limits
    if len(weights) != len(peers.names) or not all(0 <= weight <= 1 for weight in weights):
        raise WireError("a sum has a weight from 0 to 1 for each site")
    heavy = sum(weight >= limits.least_weight * weights[me] for weight in weights)
    if heavy < max(FEWEST, limits.fewest):
        raise WireError(
            f"a sum in which {heavy - 1} other sites weigh limits.least_weight = {limits.least_weight:g} of this site "
            'or more would not hide its part; take weights = "uniform" in the run, or lower it in site.toml'
        )


def under_masks(site: Node, arrays: State, asked: Facts) -> Arrays:
    """Return an answer's arrays with every fraction weighted, in fixed point and under this site's masks."""
    masking, of = site.masking, asked.get("of")
    if masking is None or masking.peers is None or masking.used:
        raise WireError("masks are agreed on before the answer, and serve once")
    if of not in ("values", "probabilities"):
        raise WireError("a sum is of values or of probabilities")
    masking.used, weight = True, masking.peers.weights[masking.place(site.name)]
    hidden: Arrays = {}
    for name, value in arrays.items():
        if value.dtype == np.int64:
            raise WireError(f"{name!r} has whole numbers, which are not summed")
        if value.dtype.kind != "f":
            hidden[name] = value
            continue
        open_ = softmax(value) if of == "probabilities" else value
        masks = masking.masks(site.name, name, value.size).reshape(value.shape)
        hidden[name] = (to_fixed(open_, weight) + masks).view(np.int64)
    return hidden


@site_verb("query.unmask", leaves=NOTHING, phase=None, quick=True, shield=Shield(("shares",)))
def open_sum(site: Node, asked: Open) -> Opened:
    """One share of each site: of its own mask if it answered, of those with others if it dropped out; never both."""
    masking, site.masking = site.masking, None
    if masking is None or masking.peers is None or not masking.used:
        raise WireError("there is no sum to open, or it was opened before")
    peers, alive = masking.peers, set(asked.alive)
    if site.name not in alive or not alive <= set(peers.names) or len(alive) < peers.threshold:
        raise WireError(f"{len(alive)} of {len(peers.names)} sites are too few to open the sum")
    me = peers.names.index(site.name)
    shares = np.zeros((len(peers.names), WIDTH), np.uint8)
    for row, name in enumerate(peers.names):
        if row == me:
            both = masking.shares[me]
        else:
            key = agreed(masking.channel, peers.channel[row], peers.told())
            try:
                text = ChaCha20Poly1305(key).decrypt(_nonce(row, me), bytes(asked.sealed[row]), None)
            except (InvalidTag, ValueError, IndexError):
                if name in alive:
                    raise WireError(f"the shares of {name} were changed on the way") from None
                continue
            both = int.from_bytes(text[:WIDTH]), int.from_bytes(text[WIDTH:])
        shares[row] = np.frombuffer(both[0 if name in alive else 1].to_bytes(WIDTH), np.uint8)
    return Opened(shares)


def agreed(private: X25519PrivateKey, public: Any, told: bytes) -> bytes:
    """Return the secret that two sites have in common and nobody between them knows, if they were told the same."""
    secret = private.exchange(X25519PublicKey.from_public_bytes(bytes(public)))
    return HKDF(hashes.SHA256(), 32, None, b"fedstill secure sum" + told).derive(secret)


def _public(key: X25519PrivateKey) -> np.ndarray:
    return np.frombuffer(key.public_key().public_bytes_raw(), np.uint8)


def _nonce(sender: int, receiver: int) -> bytes:
    return sha256(f"{sender} {receiver}".encode()).digest()[:12]  # every key is used once in each direction
