"""Secure sums, both halves. Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving ML", CCS 2017.

Before an answer that is to be summed, sites agree on pairwise masks through the coordinator; each sends its answer in
fixed point under all its masks; in the sum they cancel. A site that drops out leaves its masks in the sum: enough of
the others together hold the shares from which they are made. The coordinator learns the weighted sum and no part of it.
"""

from __future__ import annotations

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
from fedstill.common.maths.masking import WIDTH, expand, from_fixed, join, split, to_fixed
from fedstill.common.wire import Arrays, Ask, Facts, Reply, WireError
from fedstill.common.wire.typed import Message
from fedstill.strategies.verbs import NOTHING, Nothing, Shield, site_verb

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedstill.client.node import Node
    from fedstill.common.states import State
    from fedstill.server.federation import Federation

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
    """Two public keys of a site for one sum: of the channel to others, and of its masks."""

    channel: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True)
class Peers(Message):
    """The sites of a sum and their public keys, row by row; how many must be left to open it."""

    names: list[str]
    threshold: int
    channel: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True)
class Sealed(Message):
    """Shares of a site's two secrets, a row for each site, sealed for it."""

    sealed: np.ndarray


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
        me, total = self.place(name), expand(self.own, label, count)
        for row in range(len(self.peers.names)):
            if row != me:
                pair = expand(agreed(self.mask, self.peers.mask[row]), label, count)
                total = total + pair if me < row else total - pair
        return total


PROTOCOL = ("query.keys", "query.shares", "query.unmask")  # not steps of a method: no draw depends on them


@site_verb("query.keys", leaves=NOTHING, phase=None, quick=True, shield=Shield(("channel", "mask")))
def make_keys(site: Node, nothing: Nothing) -> Keys:
    """Two fresh public keys for one sum."""
    site.masking = Masking()
    return Keys(_public(site.masking.channel), _public(site.masking.mask))


@site_verb("query.shares", leaves=NOTHING, phase=None, quick=True, shield=Shield(("sealed",)))
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
    masking.peers = peers
    holders = range(1, count + 1)
    own = split(int.from_bytes(masking.own), holders, peers.threshold)
    mask = split(int.from_bytes(masking.mask.private_bytes_raw()), holders, peers.threshold)
    masking.shares = {me: (own[me + 1], mask[me + 1])}
    sealed = np.zeros((count, SEALED), np.uint8)
    for row in range(count):
        if row != me:
            both = own[row + 1].to_bytes(WIDTH) + mask[row + 1].to_bytes(WIDTH)
            key = agreed(masking.channel, peers.channel[row])
            sealed[row] = np.frombuffer(ChaCha20Poly1305(key).encrypt(_nonce(me, row), both, None), np.uint8)
    return Sealed(sealed)


def under_masks(site: Node, arrays: State, asked: Facts) -> Arrays:
    """Return an answer's arrays with every fraction weighted, in fixed point and under this site's masks."""
    masking, weight, of = site.masking, asked.get("weight"), asked.get("of")
    if masking is None or masking.peers is None or masking.used:
        raise WireError("masks are agreed on before the answer, and serve once")
    if not isinstance(weight, int | float) or not 0 <= weight <= 1 or of not in ("values", "probabilities"):
        raise WireError("a sum has weights from 0 to 1, of values or of probabilities")
    masking.used = True
    hidden: Arrays = {}
    for name, value in arrays.items():
        if value.dtype == np.int64:
            raise WireError(f"{name!r} has whole numbers, which are not summed")
        if value.dtype.kind != "f":
            hidden[name] = value
            continue
        plain = softmax(value) if of == "probabilities" else value
        masks = masking.masks(site.name, name, value.size).reshape(value.shape)
        hidden[name] = (to_fixed(plain, float(weight)) + masks).view(np.int64)
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
            key = agreed(masking.channel, peers.channel[row])
            try:
                text = ChaCha20Poly1305(key).decrypt(_nonce(row, me), bytes(asked.sealed[row]), None)
            except (InvalidTag, ValueError, IndexError):
                if name in alive:
                    raise WireError(f"the shares of {name} were changed on the way") from None
                continue
            both = int.from_bytes(text[:WIDTH]), int.from_bytes(text[WIDTH:])
        shares[row] = np.frombuffer(both[0 if name in alive else 1].to_bytes(WIDTH), np.uint8)
    return Opened(shares)


def agreed(private: X25519PrivateKey, public: Any) -> bytes:
    """Return the secret that two sites have in common and nobody between them knows."""
    secret = private.exchange(X25519PublicKey.from_public_bytes(bytes(public)))
    return HKDF(hashes.SHA256(), 32, None, b"fedstill secure sum").derive(secret)


def _public(key: X25519PrivateKey) -> np.ndarray:
    return np.frombuffer(key.public_key().public_bytes_raw(), np.uint8)


def _nonce(sender: int, receiver: int) -> bytes:
    return sha256(f"{sender} {receiver}".encode()).digest()[:12]  # every key is used once in each direction


# --- the server's half ---


def ask_for_sum(fed: Federation, ask: Ask) -> list[Reply]:
    """Put an Ask whose answers are summed; every Reply that comes back has the weighted mean in place of its part."""
    assert ask.sum is not None
    asked = fed.participants if ask.to is None else ask.to
    keys = {reply.node: reply.arrays for reply in fed.ask(make_keys.ask(to=asked, check=_keys))}
    names = tuple(keys)
    if len(names) < FEWEST:
        raise ValueError(f"a secure sum needs {FEWEST} sites, and {len(names)} are here: {', '.join(names)}")
    threshold = len(names) // 2 + 1
    rows = {kind: np.stack([np.asarray(keys[name][kind]) for name in names]) for kind in ("channel", "mask")}
    peers = Peers(list(names), threshold, rows["channel"], rows["mask"])
    shared = fed.ask(share_secrets.ask(peers, to=names, check=_rows("sealed", (len(names), SEALED))))
    sealed = {reply.node: np.asarray(reply.arrays["sealed"]) for reply in shared}
    if len(sealed) < len(names):  # who gave no shares could not be made up for
        return ask_for_sum(fed, replace(ask, to=tuple(sealed)))
    weights = _weights(fed, ask.sum, names)
    parts = {n: {**ask.each.get(n, {}), "mask": {"weight": weights[n], "of": ask.sum.of}} for n in names}
    hidden = fed.ask(replace(ask, each=parts, to=names, check=_fixed, sum=None))
    hidden = _alike(fed, ask, hidden)
    alive = [reply.node for reply in hidden]
    each = {n: {"sealed": np.stack([sealed[o][row] for o in names])} for row, n in enumerate(names) if n in alive}
    asking = open_sum.ask(to=tuple(alive), each=each, check=_rows("shares", (len(names), WIDTH)))
    opened = fed.ask(replace(asking, settings={"alive": alive}))
    if len(opened) < threshold:
        raise ValueError(f"{len(opened)} of {len(names)} sites are left, and {threshold} are needed to open the sum")
    some = {names.index(reply.node) + 1: np.asarray(reply.arrays["shares"]) for reply in opened[:threshold]}
    joined = [join({x: int.from_bytes(bytes(shares[row])) for x, shares in some.items()}) for row in range(len(names))]
    mean = _mean(hidden, names, joined, rows["mask"], sum(weights[name] for name in alive), ask.sum.of)
    replies = [replace(reply, arrays={**reply.arrays, **mean}) for reply in hidden]
    if ask.check is not None:
        for reply in replies:
            ask.check(reply)
    return replies


def _alike(fed: Federation, ask: Ask, hidden: list[Reply]) -> list[Reply]:
    """Return the answers that can be added: one of another form would spoil the sum, and is left out as if lost."""
    forms = [tuple(sorted((name, value.shape) for name, value in reply.arrays.items())) for reply in hidden]
    usual = max(forms, key=forms.count)
    for reply, form in zip(hidden, forms, strict=True):
        if form != usual:
            fed.event("left_out", site=reply.node, verb=ask.verb, reason="its masked answer has another form")
    return [reply for reply, form in zip(hidden, forms, strict=True) if form == usual]


def _weights(fed: Federation, kind: Summed, names: tuple[str, ...]) -> dict[str, float]:
    if kind.weights == "uniform":
        return {name: 1 / len(names) for name in names}
    if kind.weights == "size":
        sizes = {name: int(fed.sites[name]["texts"]) for name in names}
        return {name: size / max(1, sum(sizes.values())) for name, size in sizes.items()}
    assert not isinstance(kind.weights, str)
    return {name: float(kind.weights[name]) for name in names}


def _mean(
    hidden: list[Reply], names: tuple[str, ...], secret: list[int], public: np.ndarray, weight: float, of: Of
) -> Arrays:
    """Add the masked answers, take off what does not cancel, and divide by the weight of those who answered."""
    alive = {reply.node for reply in hidden}
    gone_rows = [row for row, name in enumerate(names) if name not in alive]
    lost = {names[row]: X25519PrivateKey.from_private_bytes(secret[row].to_bytes(32)) for row in gone_rows}
    fractions = [name for name, value in hidden[0].arrays.items() if value.dtype == np.int64]
    mean: Arrays = {}
    for array in fractions:
        shape = hidden[0].arrays[array].shape
        count = int(np.prod(shape))
        total = np.zeros(count, np.uint64)
        for reply in hidden:
            total += np.asarray(reply.arrays[array]).reshape(-1).view(np.uint64)
        for row, name in enumerate(names):
            if name in alive:
                total -= expand(secret[row].to_bytes(32), array, count)
                for gone, key in lost.items():
                    pair = expand(agreed(key, public[row]), array, count)
                    total = total - pair if row < names.index(gone) else total + pair
        value = from_fixed(total).reshape(shape) / weight
        if of == "probabilities":
            value = np.log(np.clip(value, 1e-12, 1.0))  # logits of just these probabilities
        mean[array] = value.astype(np.float32)
    return mean


def _keys(reply: Reply) -> None:
    for kind in ("channel", "mask"):
        value = reply.arrays[kind]
        if value.shape != (32,) or value.dtype != np.uint8:
            raise WireError("a public key has 32 bytes")


def _rows(name: str, shape: tuple[int, int]) -> Any:
    def check(reply: Reply) -> None:
        if reply.arrays[name].shape != shape or reply.arrays[name].dtype != np.uint8:
            raise WireError(f"{name} of shape {reply.arrays[name].shape} instead of {shape}")

    return check


def _fixed(reply: Reply) -> None:
    if any(value.dtype.kind == "f" for value in reply.arrays.values()):
        raise WireError("an answer to be summed came without its masks")
