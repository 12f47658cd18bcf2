"""Crash recovery: checkpoints of server and sites, resumed runs, and sites that return."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstill.common import checkpoint
from fedstill.common.readable import plain
from fedstill.common.wire import Facts
from fedstill.server.countersign import signature
from fedstill.strategies.generic import Keep, restore, save

if TYPE_CHECKING:
    from fedstill.server.federation import Federation


def save_round(fed: Federation, number: int) -> None:
    """Save a round at the sites first, so that they hold whatever the server holds; late sites may be back by now.

    Where a round draws some of many sites, one that was asked nothing since its last checkpoint is as it was then.
    """
    fed.late.clear()
    drawn = fed.method.p.participation < 1
    to = tuple(name for name in fed.sites if not drawn or name in fed.touched or name not in fed.saved)
    kept = fed.ask(save.ask(Keep(number), to=to, optional=True))
    holding = (set(fed.sites) - set(to)) | {reply.node for reply in kept}  # of all sites: `to` may be one liar alone
    fed.require(fed.quorum(len(fed.sites)), tuple(fed.sites), holding, save.name)
    fed.saved.update({reply.node: number for reply in kept})
    fed.touched -= {reply.node for reply in kept}
    heads = {reply.node: plain(reply.metrics["ledger"], 64) for reply in kept}
    key, run = fed.config.exchange.key, fed.record.folder.name
    signed = None if key is None else signature(key, run, number, heads)
    fed.record.event("ledgers", round=number, heads=heads, **({} if signed is None else {"signature": signed}))
    arrays = {"central": fed.central.learner.state(copy=False), "method": fed.method.state()}
    fed.record.save_round(number, arrays, {"round": number, **fed.results.facts(), "spending": fed.costs.facts(),
                                           "saved": fed.saved})  # fmt: skip


def resume(fed: Federation) -> int | None:
    """Return the last finished round that a quorum of the sites holds; None where the run starts over.

    If too many sites lost their checkpoints, the server's last one is used: finished rounds are not repeated because a
    site was away.
    """
    held = {name: set(facts.get("rounds", [])) for name, facts in fed.sites.items()}
    needed = fed.quorum(len(held))
    everywhere = set().union(*held.values())
    enough = {number for number in everywhere if sum(number in rounds for rounds in held.values()) >= needed}
    newest = checkpoint.newest(fed.record.checkpoints)
    if newest is not None and len(_holders(held, newest)) < needed:
        newest = checkpoint.newest(fed.record.checkpoints, enough) or newest
    if newest is None:
        fed.record.event("resumed", round=None, reason="there is no checkpoint that can be read")
        return None
    number, arrays, facts, problems = newest
    for problem in problems:
        fed.record.event("damaged", problem=problem)
    fed.central.learner.load_state(arrays["central"])
    fed.method.load_state(arrays.get("method", {}))
    fed.results.load(facts)
    fed.costs.load(facts["spending"])
    fed.saved = dict(facts.get("saved", {}))
    holders = _holders(held, newest)
    restored: set[str] = set()
    for saved in sorted(set(holders.values())):
        at_once = tuple(name for name, at in holders.items() if at == saved)
        restored.update(reply.node for reply in fed.ask(restore.ask(Keep(saved), to=at_once, optional=True)))
    fed.require(min(needed, len(holders)), tuple(holders), restored, restore.name)
    for name in held:
        if name not in holders:
            take_up_alone(fed, name, [other for other in held[name] if other < number], number)
    fed.record.event("resumed", round=number)
    return number


def _holders(held: dict[str, set[int]], newest: tuple[int, object, Facts, object]) -> dict[str, int]:
    """Return the sites that hold the state they had in this checkpoint, and the round they saved it in."""
    number, _, facts, _ = newest
    saved = {name: facts.get("saved", {}).get(name, number) for name in held}
    return {name: saved[name] for name in held if saved[name] in held[name]}


def let_in(fed: Federation) -> None:
    """Let restarted sites load their own last checkpoint; a site without one starts with a new model."""
    for name, facts in fed.link.returned().items():
        fed.away.setdefault(name, "it began anew")
        take_up_alone(fed, name, [number for number in facts.get("rounds", []) if number < fed.number], fed.number)


def take_up_alone(fed: Federation, name: str, held: list[int], number: int) -> None:
    """Let a site that missed rounds continue from its last state; a site without one starts with a new model."""
    fed.method.site_began_anew(name)
    if held:
        fed.ask(restore.ask(Keep(max(held)), to=(name,), optional=True))
    else:
        fed.record.event("site_reset", site=name, round=number, reason="it holds no checkpoint")
