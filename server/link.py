"""Links carry Asks to sites and bring their Replies back. A Method cannot tell which kind it uses."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedstill.common.config import LONGEST_NAME, RunConfig
from fedstill.common.readable import plain, sentence
from fedstill.common.wire import Ask, Facts, Failure, Reply, from_records, size_of, to_records
from fedstill.common.wire.frames import ASK, REPLY, Frame, head_of
from fedstill.common.wire.heads import Forms
from fedstill.common.wire.messages import without_items
from fedstill.common.wire.spool import Spool
from fedstill.server.admission import why_no_name
from fedstill.server.exchange import Exchange
from fedstill.server.record import Record

log = logging.getLogger("flwr")

Admit = Callable[[Facts], str | None]
Notice = Callable[[str, Facts], None]
POLL = 1.0
AWAY = {3, 4, 5}  # Flower's error codes for a message that is gone and for a node that missed its heartbeats


class JoinError(RuntimeError):
    """Some sites did not join; the text names them and the reasons, as far as known."""


class Link(ABC):
    """Delivers an Ask to sites and brings their Replies back."""

    sites: dict[str, Facts]  # name -> the site's greeting, in the run's order

    @abstractmethod
    def deliver(self, parts: dict[str, Ask], deadline: float) -> Iterator[Reply | Failure]:
        """Send each named site its part of an Ask; the iterator has the answers as they come."""

    def returned(self) -> dict[str, Facts]:
        """Return the greetings of sites that restarted since the last call."""
        return {}

    @abstractmethod
    def traffic(self) -> dict[str, tuple[int, int]]:
        """Return the bytes up and down of each site so far."""

    @abstractmethod
    def close(self, facts: Facts) -> None:
        """Tell the sites how the run ended."""


class Answering(Protocol):
    """A node as a link sees it."""

    name: str

    def greeting(self) -> Facts: ...
    def answer(self, ask: Ask) -> Reply: ...


class LocalLink(Link):
    """Nodes in this process: no Flower, no network, the same Asks."""

    def __init__(
        self,
        nodes: Sequence[Answering],
        admit: Admit = lambda facts: None,
        order: Callable[[Iterable[str]], list[str]] = list,  # in which an Ask's sites are asked
    ) -> None:
        self.nodes, self._order = {node.name: node for node in nodes}, order
        self.sites = {node.name: node.greeting() for node in nodes}
        self._bytes = {name: [0, 0] for name in self.nodes}
        self._number = 0
        self._forms = {name: (Forms(), Forms()) for name in self.nodes}
        refused = {name: reason for name, facts in self.sites.items() if (reason := admit(facts)) is not None}
        if refused:
            raise JoinError("; ".join(f"{name}: {reason}" for name, reason in refused.items()))

    def deliver(self, parts: dict[str, Ask], deadline: float) -> Iterator[Reply | Failure]:
        self._number += 1
        for name in self._order(parts):
            ask = parts[name]
            self._count(name, Frame(ASK, self._number, ask.arrays, {"verb": ask.verb, "settings": ask.settings}))
            try:
                reply = self.nodes[name].answer(ask)
            except Exception as error:
                yield Failure(name, f"{type(error).__name__}: {error}")
                continue
            said = without_items(ask.arrays, reply.arrays)
            self._count(name, Frame(REPLY, self._number, said, {"metrics": reply.metrics}))
            yield reply

    def _count(self, name: str, frame: Frame) -> None:
        """Count the bytes that a frame would have on a stream."""
        way = 1 if frame.kind == ASK else 0
        self._bytes[name][way] += len(head_of(frame, self._forms[name][way])) + frame.size

    def traffic(self) -> dict[str, tuple[int, int]]:
        return {name: (up, down) for name, (up, down) in self._bytes.items()}

    def close(self, facts: Facts) -> None:
        self.nodes.clear()


class FlowerLink(Link):
    """What both links over Flower share: finding the nodes and inviting each to join."""

    def __init__(self, grid: Grid, config: RunConfig, run: str, admit: Admit, notice: Notice) -> None:
        self.grid, self.config, self.run, self.admit, self.notice = grid, config, run, admit, notice
        self.sites = {}
        self._joins: dict[str, int] = {}  # id of a join message -> node
        self._errors: dict[int, str] = {}  # node -> why its join failed
        self._away: set[int] = set()  # nodes whose join failed because Flower did not reach them
        self._invited: dict[int, str] = {}  # node -> when Flower says that it was activated
        self.node_of: dict[str, int] = {}  # of the sites that have joined
        self._registered: dict[int, str] = {}  # node -> the name that its key was registered under

    def _invite(self, facts: Callable[[int], Facts]) -> None:
        """Send a join message to every node that has appeared since the last call, or reappeared without joining.

        Flower never notices a SuperNode that was killed and restarted at once, and its message is lost.
        """
        nodes = {node.node_id: node for node in self.grid.get_nodes()}
        self._registered.update({number: node.name for number, node in nodes.items() if node.name})
        activated = {number: str(node.last_activated_at) for number, node in nodes.items()}
        invited = sorted(
            n for n in nodes if self._invited.get(n) != activated[n] and not (n in self._invited and self._here(n))
        )
        common = {"config": self.config.to_json(), "run": self.run}
        ttl = self.config.exchange.session_hours * 3600
        messages = [Message(to_records({}, {**common, **facts(node)}), node, "query.join", ttl=ttl) for node in invited]
        if messages:
            self._joins.update(zip(self.grid.push_messages(messages), invited, strict=True))
            self._invited.update({number: activated[number] for number in invited})

    @abstractmethod
    def _here(self, node: int) -> bool:
        """Return whether an invited node has joined and is present."""

    def _bound(self, node: int, name: str) -> str | None:
        """Return why a node may not be the site `name`: a registered key is bound to its registered name."""
        bound = self._registered.get(node)
        if bound is not None and bound != name:
            return (
                f"its key is registered as {bound!r} and it calls itself {name!r}: set name in site.toml, or let the "
                f"coordinator register the key anew: fedstill keys revoke {bound}; "
                f"fedstill keys register SITE.pub {name}"
            )
        if bound is None and name in self._registered.values():
            return f"the name {name!r} belongs to another key: fedstill keys list shows whose"
        return None

    def _wait_for_joins(self, facts: Callable[[int], Facts], joined: Callable[[], dict[str, Facts]]) -> None:
        """Invite nodes until every site has joined; list those missing at the deadline, or once none can still come."""
        wanted = self.config.expected_sites
        if wanted == 0:
            raise JoinError("the run names no sites: write [[sites]] tables, or set exchange.sites to their number")
        end = time.monotonic() + self.config.exchange.join_deadline
        while True:
            self._forget_absent()
            self._invite(facts)
            before, self.sites = self.sites, self._in_order(joined())
            new = [name for name in self.sites if name not in before]
            for number, name in enumerate(new, len(self.sites) - len(new) + 1):
                self.notice("site_joined", {"site": name, "joined": number, "wanted": wanted})
            if len(self.sites) >= wanted:
                return
            hopeful = set(self._joins.values()) | set(self.node_of.values()) | self._away
            if time.monotonic() > end or (self._errors and len(hopeful) < wanted):
                raise self._join_error()
            time.sleep(POLL / 2)

    def _forget_absent(self) -> None:
        """Invite a node that Flower did not reach again once it is listed: after a restart of the SuperLink or of a
        host, nodes take a while to report, and an absent node has refused nothing."""
        for node in self._away:
            self._errors.pop(node, None)
            self._invited.pop(node, None)
        self._away.clear()

    def _pull_joins(self) -> Iterator[tuple[int, RecordDict]]:
        """Yield the joins answered since the last call; errors are kept by node."""
        if not self._joins:
            return
        for message in self.grid.pull_messages(list(self._joins)):
            node = self._joins.pop(message.metadata.reply_to_message_id, message.metadata.src_node_id)
            if message.has_error():
                self._errors[node] = plain(sentence(str(message.error.reason)))
                if message.error.code in AWAY:
                    self._away.add(node)
                self.notice("join_failed", {"node": str(node), "reason": self._errors[node]})
            else:
                yield node, message.content

    def _missing(self) -> str:
        names = [site.name for site in self.config.sites if site.name not in self.sites]
        return f"not joined: {', '.join(names)}" if names else "the run does not name its sites"

    def _join_error(self) -> JoinError:
        joined = f"{len(self.sites)} of {self.config.expected_sites} sites joined"
        if self._errors:
            reasons = "; ".join(dict.fromkeys(self._errors.values()))
            return JoinError(f"{reasons} ({joined}; {self._missing()})")
        return JoinError(
            f"{joined} within exchange.join_deadline = {self.config.exchange.join_deadline:.0f} s, and "
            f"{len(self._invited)} SuperNodes are connected; {self._missing()}. Start them, or raise the deadline; in "
            "Flower's simulation every site of a stream needs an actor of its own: raise simulation.cpus, or set "
            'exchange.link = "messages"'
        )

    def _in_order(self, sites: dict[str, Facts]) -> dict[str, Facts]:
        """Sort sites by the run's order, then by name: nothing may depend on who came first."""
        order = {site.name: number for number, site in enumerate(self.config.sites)}
        return dict(sorted(sites.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


class StreamLink(FlowerLink):
    """One join message per site; then every Ask goes over the site's own gRPC stream."""

    def __init__(
        self, grid: Grid, config: RunConfig, run: str, admit: Admit, notice: Notice, spool: Spool | None = None
    ) -> None:
        super().__init__(grid, config, run, admit, notice)
        settings = config.exchange
        self.exchange = Exchange(
            settings.listen,
            admit,
            limit=settings.max_frame_mb << 20,
            keep_alive=settings.keep_alive,
            patience=settings.reconnect,
            certificate=settings.certificate,
            key=settings.key,
            authority=settings.authority,
            write_deadline=settings.write_deadline,
            most_sites=config.expected_sites,
            spool=spool,
            notice=notice,
            bound=self._bound,
        )
        try:
            self._open()
        except BaseException as error:
            self.exchange.close({"status": "failed", "reason": str(error)})
            raise

    def _open(self) -> None:
        host = self.config.exchange.listen.rpartition(":")[0]
        address = self.config.exchange.advertise or f"{host}:{self.exchange.port}"
        door = {"address": address, "secure": self.exchange.secure, "link": "stream"}
        self.notice("joining", {"sites": self.config.expected_sites, "address": address})

        def joined() -> dict[str, Facts]:
            for _ in self._pull_joins():
                pass
            seats = dict(self.exchange.by_name)
            self.node_of = {name: seat.node_id for name, seat in seats.items()}
            return {name: seat.greeting for name, seat in seats.items()}

        def join_facts(node: int) -> Facts:
            self.exchange.asked_again(node)
            return {**door, "token": self.exchange.issue_token(node)}

        self._join_facts: Callable[[int], Facts] = join_facts
        self._wait_for_joins(self._join_facts, joined)
        self._watched_at = time.monotonic()

    def deliver(self, parts: dict[str, Ask], deadline: float) -> Iterator[Reply | Failure]:
        if time.monotonic() - self._watched_at > 10:
            self._watch()
        return self.exchange.deliver(parts, deadline)

    def _watch(self) -> None:
        """Give up sites whose session Flower reports as over."""
        self._watched_at = time.monotonic()
        for _ in self._pull_joins():
            pass
        for node, reason in self._errors.items():
            self.exchange.give_up(node, reason)

    def returned(self) -> dict[str, Facts]:
        """As every link; also invite again the sites that were given up or lost, and any newcomers."""
        self._watch()
        for node in [node for node in self._errors if not self._here(node)]:
            self._invited.pop(node, None)
        self._errors.clear()
        self._invite(self._join_facts)
        rejoined = {name: facts for name, facts in self.exchange.returned().items() if name in self.sites}
        self.sites.update(rejoined)
        self.node_of.update({name: self.exchange.by_name[name].node_id for name in rejoined})
        return rejoined

    def _here(self, node: int) -> bool:
        return self.exchange.present(node)

    def traffic(self) -> dict[str, tuple[int, int]]:
        return self.exchange.traffic()

    def close(self, facts: Facts) -> None:
        self.exchange.close(facts)


class MessageLink(FlowerLink):
    """Every Ask is a separate Flower message; the site restores its model from its state folder each time."""

    def __init__(self, grid: Grid, config: RunConfig, run: str, admit: Admit, notice: Notice) -> None:
        super().__init__(grid, config, run, admit, notice)
        self._bytes: dict[str, list[int]] = {}
        self._number = 0
        greeted: dict[str, Facts] = {}
        notice("joining", {"sites": config.expected_sites, "address": "Flower messages"})

        def joined() -> dict[str, Facts]:
            for node, content in self._pull_joins():
                name, reason = "?", None
                try:
                    facts = from_records(content)[1]
                    name = plain(facts["name"], LONGEST_NAME)
                    reason = self._why_not(node, facts, greeted)
                except Exception as error:  # whatever one site sends, the others join
                    reason = f"what it says of itself cannot be read: {type(error).__name__}"
                if reason is None:
                    greeted[name] = facts
                    self.node_of[name] = node
                else:
                    self._errors[node] = plain(reason)
                    notice("refused", {"site": name, "reason": self._errors[node]})
            return greeted

        self._wait_for_joins(lambda node: {"link": "messages"}, joined)
        self._bytes = {name: [0, 0] for name in self.sites}

    def _why_not(self, node: int, facts: Facts, greeted: dict[str, Facts]) -> str | None:
        """Return why a node is not admitted under its name, or None: the same rules as on the stream."""
        reason = why_no_name(facts.get("name")) or self._bound(node, str(facts["name"])) or self.admit(facts)
        if reason is None and facts["name"] in greeted and self.node_of[facts["name"]] != node:
            return f"site {facts['name']} is here already: give every site a name of its own"
        return reason

    def deliver(self, parts: dict[str, Ask], deadline: float) -> Iterator[Reply | Failure]:
        messages = [self._message(name, ask) for name, ask in parts.items()]
        waiting = dict(zip(self.grid.push_messages(messages), parts, strict=True))
        return self._answers(waiting, deadline)

    def _answers(self, waiting: dict[str, str], deadline: float) -> Iterator[Reply | Failure]:
        end = time.monotonic() + deadline
        while waiting:
            for message in self.grid.pull_messages(list(waiting)):
                name = waiting.pop(message.metadata.reply_to_message_id)
                yield self._outcome(name, message)
            if waiting and time.monotonic() > end:
                for name in waiting.values():
                    yield Failure(name, f"no answer within {deadline:.0f} s", gone=True)
                return
            if waiting:
                time.sleep(POLL / 4)

    def _here(self, node: int) -> bool:
        return node in self.node_of.values()

    def _message(self, name: str, ask: Ask) -> Message:
        self._number += 1
        facts = {"settings": ask.settings, "config": self.config.to_json(), "run": self.run, "number": self._number}
        self._bytes[name][1] += size_of(ask.arrays, facts)
        return Message(to_records(ask.arrays, facts), self.node_of[name], ask.verb, ttl=86400.0)

    def _outcome(self, name: str, message: Message) -> Reply | Failure:
        if message.has_error():
            return Failure(name, str(message.error.reason))
        try:
            arrays, facts = from_records(message.content)
            if "error" in facts:
                return Failure(name, str(facts["error"]))
            self._bytes[name][0] += size_of(arrays, facts)
            return Reply(name, arrays, facts.get("metrics", {}))
        except Exception as error:  # whatever one site sends, the others go on
            return Failure(name, f"a message that cannot be read: {error}")

    def traffic(self) -> dict[str, tuple[int, int]]:
        return {name: (up, down) for name, (up, down) in self._bytes.items()}

    def close(self, facts: Facts) -> None:
        self.notice("closed", facts)


def open_link(grid: Grid, config: RunConfig, record: Record, admit: Admit) -> FlowerLink:
    """Open the configured link; return when every site has joined."""

    def notice(kind: str, facts: Facts) -> None:
        record.event(kind, **facts)
        log.info("%s: %s", kind, facts)

    run = record.folder.name
    if config.exchange.link == "stream":
        return StreamLink(grid, config, run, admit, notice, Spool(record.folder))
    return MessageLink(grid, config, run, admit, notice)
