"""Secure sums, the coordinator's half: who is in a sum, the masked answers, and the sum without its masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedstill.common.maths.masking import WIDTH, expand, from_fixed, join
from fedstill.common.wire import Arrays, Ask, Reply, WireError
from fedstill.strategies.secure_sum.site import (
    FEWEST,
    SEALED,
    Of,
    Peers,
    Summed,
    agreed,
    make_keys,
    open_sum,
    share_secrets,
)

if TYPE_CHECKING:
    from fedstill.server.federation import Federation


def ask_for_sum(fed: Federation, ask: Ask) -> list[Reply]:
    """Put an Ask whose answers are summed; every Reply that comes back has the weighted mean in place of its part."""
    assert ask.sum is not None
    asked = fed.participants if ask.to is None else ask.to
    made = {reply.node: reply for reply in fed.ask(make_keys.ask(to=asked, check=_keys))}
    names = tuple(made)
    if len(names) < FEWEST:
        raise ValueError(f"a secure sum needs {FEWEST} sites, and {len(names)} are here: {', '.join(names)}")
    threshold = len(names) // 2 + 1
    rows = {kind: np.stack([np.asarray(made[name].arrays[kind]) for name in names]) for kind in ("channel", "mask")}
    signatures, weights = [made[name].metrics.get("signature", "") for name in names], _weights(fed, ask.sum, names)
    signatures = signatures if any(signatures) else []
    each_weight = [weights[name] for name in names]
    peers = Peers(list(names), threshold, each_weight, rows["channel"], rows["mask"], signatures)
    shared = fed.ask(share_secrets.ask(peers, to=names, check=_rows("sealed", (len(names), SEALED))))
    sealed = {reply.node: np.asarray(reply.arrays["sealed"]) for reply in shared}
    agreeing = _agreeing(fed, {reply.node: reply.metrics.get("strangers", []) for reply in shared})
    if len(agreeing) < len(names):  # who gave no shares could not be made up for
        return ask_for_sum(fed, replace(ask, to=agreeing))
    parts = {n: {**ask.each.get(n, {}), "mask": {"of": ask.sum.of}} for n in names}
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
    mean = _mean(hidden, peers, joined, sum(weights[name] for name in alive), ask.sum.of)
    replies = [replace(reply, arrays={**reply.arrays, **mean}) for reply in hidden]
    if ask.check is not None:
        for reply in replies:
            ask.check(reply)
    return replies


def _agreeing(fed: Federation, strangers: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Return sites that all take each other's keys.

    Who has most quarrels goes first, and of two with each other the one that complains: a liar is alone against all.
    """
    left = list(strangers)
    while True:
        quarrels = {(one, other) for one in left for other in strangers[one] if other in left and other != one}
        if not quarrels:
            return tuple(left)
        against = {name: sorted({n for pair in quarrels if name in pair for n in pair} - {name}) for name in left}
        worst = max(left, key=lambda name: (len(against[name]), any(one == name for one, _ in quarrels)))
        reason = f"its keys and those of {', '.join(against[worst])} are not signed as `peers` in a site.toml has it"
        fed.event("left_out", site=worst, verb=share_secrets.name, reason=reason)
        left.remove(worst)


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


def _mean(hidden: list[Reply], peers: Peers, secret: list[int], weight: float, of: Of) -> Arrays:
    """Add the masked answers, take off what does not cancel, and divide by the weight of those who answered."""
    names, public, told = peers.names, peers.mask, peers.told()
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
                    pair = expand(agreed(key, public[row], told), array, count)
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
