"""A federation in one process: real models, texts and methods, and links from a plain call to real streams."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fedstill.client.node import Node
from fedstill.client.session import Door, Session
from fedstill.common.config import RunConfig
from fedstill.common.wire import Ask, Facts, Failure, Reply
from fedstill.deploy.launch.process import InProcess, assemble
from fedstill.server.exchange import Exchange
from fedstill.server.link import Link


class Federation(InProcess):
    """A run in a folder, with what tests look at."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        made = assemble(config, folder / "run", folder / "sites", "run")
        super().__init__(made.federation, made.nodes)
        self.config, self.folder = config, folder
        self.central, self.method, self.record = made.federation.central, made.federation.method, made.federation.record

    def admit(self) -> Callable[[Facts], str | None]:
        return self.federation.admission()

    def run(self, link: Link | bool | None = None, resume: bool = False) -> Facts:
        chosen = link if isinstance(link, Link) else self.link()
        return self.federation.run(chosen, resume)

    def events(self, kind: str) -> list[Facts]:
        import json

        lines = (self.folder / "run/events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def weights(self) -> str:
        """A hash over the central model's and every site's weights."""
        digest = hashlib.sha256()
        for learner in [self.central.learner, *(node.learner for node in self.nodes)]:
            for name, value in sorted(learner.weights().items()):
                digest.update(name.encode() + value.tobytes())
        return digest.hexdigest()


class ExchangeLink(Link):
    """Streams without Flower: what StreamLink does once the joins are sent."""

    def __init__(self, exchange: Exchange, names: list[str]) -> None:
        self.exchange = exchange
        self.sites = {name: exchange.by_name[name].greeting for name in names}

    def deliver(self, parts: dict[str, Ask], deadline: float) -> Iterator[Reply | Failure]:
        return self.exchange.deliver(parts, deadline)

    def returned(self) -> dict[str, Facts]:
        found = self.exchange.returned()
        self.sites.update(found)
        return found

    def traffic(self) -> dict[str, tuple[int, int]]:
        return self.exchange.traffic()

    def close(self, facts: Facts) -> None:
        self.exchange.close(facts)


@contextmanager
def streams(federation: Federation, through: Callable[[int], int] = lambda port: port) -> Iterator[ExchangeLink]:
    """Every node in a thread of its own behind a real stream; `through` may put something before the port."""
    exchange = Exchange("127.0.0.1:0", federation.admit(), patience=20, notice=_note(federation))
    port = through(exchange.port)
    sessions = [
        Session(Door(f"127.0.0.1:{port}", exchange.issue_token(number), patience=20), node.greeting(), node.answer)
        for number, node in enumerate(federation.nodes)
    ]
    threads = [threading.Thread(target=session.serve, daemon=True) for session in sessions]
    for thread in threads:
        thread.start()
    assert exchange.wait_for(len(sessions), 30)
    link = ExchangeLink(exchange, [node.name for node in federation.nodes])
    try:
        yield link
    finally:
        link.close({"status": "finished"})
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def _note(federation: Federation) -> Callable[[str, Facts], None]:
    return lambda kind, facts: federation.record.event(kind, **facts)


@pytest.fixture
def federation(tmp_path: Path) -> Callable[..., Federation]:
    """Make a federation; several in one test get folders of their own unless one is named."""
    made: list[int] = []

    def make(config: RunConfig, folder: str | None = None) -> Federation:
        made.append(1)
        return Federation(config, tmp_path / (folder or f"federation-{len(made)}"))

    return make


def precise(config: RunConfig) -> RunConfig:
    """The same run in float64, for methods that are compared with their definition.

    Two float32 ways to one number differ in its last bit, differently on every processor, and Adam's first steps make
    whole steps of gradients that are nothing but such bits. In float64 what is left is 1e-12.
    """
    exact = {"precision": "float64"}
    sites = [site.model_copy(update=exact) for site in config.sites]
    return config.model_copy(update={"central": config.central.model_copy(update=exact), "sites": sites})


def spoil(node: Node, change: Callable[[Ask, Reply], Reply]) -> None:
    """Make a site answer something else than its model says."""
    honest = node.answer

    def answer(ask: Ask) -> Reply:
        return change(ask, honest(ask))

    node.answer = answer  # type: ignore[method-assign]


def with_nan(ask: Ask, reply: Reply) -> Reply:
    if "logits" not in reply.arrays:
        return reply
    return Reply(reply.node, {**reply.arrays, "logits": np.full_like(reply.arrays["logits"], np.nan)}, reply.metrics)


@pytest.fixture(autouse=True)
def streams_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that fails in the middle leaves no stream behind that would keep the process alive."""
    made: list[Exchange] = []
    begin = Exchange.__init__

    def note(self: Exchange, *args: object, **kwargs: object) -> None:
        begin(self, *args, **kwargs)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(Exchange, "__init__", note)
    yield
    for exchange in made:
        if not exchange._closed:
            exchange.close({"status": "failed"})
