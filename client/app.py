"""The site's Flower ClientApp: one `join` message opens a session; with plain messages every verb has its handler."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedstill.client.own_task import node_kind
from fedstill.client.release import approval
from fedstill.client.release.ledger import Ledger
from fedstill.client.release.limits import check_files
from fedstill.client.residents import Kept
from fedstill.client.session import Door, Session
from fedstill.common.config import ConfigError, RunConfig, SiteConfig, SiteFile
from fedstill.common.config.files import load_run, load_site
from fedstill.common.wire import Ask, Facts, from_records, to_records
from fedstill.strategies import all_verbs

BESIDE = 8  # sites that an actor of Flower's simulation keeps in memory, where the run does not say
KEPT = Kept()  # a process that lives on answers the next message without loading the model again
app = ClientApp()
log = logging.getLogger("flwr")


@app.query("join")
def join(message: Message, context: Context) -> Message:
    """Load the site's model once and serve the run's Asks until it ends; with `messages`, only report the greeting."""
    _, facts = from_records(message.content)
    config, run = load_run(str(facts["config"])), str(facts["run"])
    with _beginning(config, context, run) as site:
        node = node_kind(config)(config, site, run, state_root(site))
        door = None if facts["link"] == "messages" else _door(config, site, facts)
    greeting = node.greeting()
    node.ledger.joined(greeting)
    if door is None:
        node.forget_work()
        return Message(to_records({}, greeting), reply_to=message)
    session = Session(door, greeting, node.answer)
    end = session.serve()
    log.info("site %s: session over, %s", site.name, end)
    traffic = {"bytes_up": session.bytes_out, "bytes_down": session.bytes_in, "connections": session.connections}
    return Message(to_records({}, {**traffic, **end}), reply_to=message)


def answer_message(message: Message, context: Context) -> Message:
    """Answer one Ask sent as a Flower message: restore the model, work, and save it again."""
    arrays, facts = from_records(message.content)
    config, run = load_run(str(facts["config"])), str(facts["run"])
    with _beginning(config, context, run) as site:
        node = KEPT.take(config, site, run, state_root(site))
    verb = message.metadata.message_type
    try:
        reply = node.answer(Ask(verb, arrays, facts["settings"]))
    except Exception as error:  # the coordinator leaves this site out of the step and logs why
        return Message(to_records({}, {"error": f"{type(error).__name__}: {error}"}), reply_to=message)
    node.put_away(int(facts["number"]))
    KEPT.keep(node, int(facts["number"]), config.simulation.resident or BESIDE)
    return Message(to_records(reply.arrays, {"metrics": reply.metrics}), reply_to=message)


@contextmanager
def _beginning(config: RunConfig, context: Context, run: str) -> Iterator[SiteConfig]:
    """Yield the site if it takes part in the run; why it does not is in its ledger, and only there where it hides."""
    own = context.node_config.get("site") is not None
    who, hidden, ledger = "a site", own and node_kind(config).task_is_secret, None
    try:
        site = find_site(config, context)
        who, hidden = f"site {site.name}", hidden or site.privacy is not None
        ledger = Ledger(state_root(site) / "ledger.jsonl", run[:128])
        if own:
            check_files(config, site)
        approval.require(config, run, site, state_root(site))
        yield site
    except Exception as error:
        if ledger is not None:
            ledger.not_joined(error)
        if hidden:
            log.error("%s: %s", who, error)  # its text may quote a label or reveal the task
            raise RuntimeError(f"{who} cannot begin; its own log says why, since its texts are its secret") from None
        raise RuntimeError(f"{who}: {error}") from error


for _verb in all_verbs():
    _kind, _, _action = _verb.partition(".")
    getattr(app, _kind)(_action)(answer_message)


def find_site(config: RunConfig, context: Context) -> SiteConfig:
    """Return the site that this SuperNode serves: from its own file, or the run's entry with its partition number."""
    path = context.node_config.get("site")
    if path is not None:
        return load_site(Path(str(path)))
    number = context.node_config.get("partition-id")
    if number is None:
        raise ConfigError(
            "this SuperNode does not say which site it is: start it with --node-config 'site=\"/path/to/site.toml\"', "
            "or 'partition-id=0' for the first of the run's [[sites]]"
        )
    if not 0 <= int(number) < len(config.sites):
        raise ConfigError(f"partition-id={number}, but the run has {len(config.sites)} [[sites]] (0 is the first)")
    site = config.sites[int(number)]
    certificates = context.node_config.get("root-certificates")
    return site if certificates is None else site.model_copy(update={"root_certificates": Path(str(certificates))})


def state_root(site: SiteConfig) -> Path:
    """Return the site's state folder: its own setting, else $FEDSTILL_STATE, else the user's state folder."""
    if site.state is not None:
        return site.state.expanduser() / site.name
    return Path(os.environ.get("FEDSTILL_STATE") or Path.home() / ".local/state/fedstill") / site.name


def _door(config: RunConfig, site: SiteConfig, facts: Facts) -> Door:
    if site.root_certificates is not None and not facts["secure"]:
        raise ConfigError(
            f"site {site.name} trusts only {site.root_certificates}, but the coordinator's stream has no TLS: "
            "set exchange.certificate and exchange.key there"
        )
    if facts["secure"] and site.root_certificates is None:
        raise ConfigError(
            "the coordinator's stream has TLS and this site has no CA certificate: "
            "set root_certificates in site.toml, or --node-config 'root-certificates=\"ca.crt\"'"
        )
    exchange = config.exchange
    return Door(
        site.stream or str(facts["address"]),
        str(facts["token"]),
        site.root_certificates,
        own_pair(site),
        exchange.max_frame_mb << 20,
        exchange.keep_alive,
        exchange.reconnect,
    )


def own_pair(site: SiteConfig) -> tuple[bytes, bytes] | None:
    """Return the key and certificate with which the site shows itself on the stream; None if it has none."""
    if not isinstance(site, SiteFile) or site.certificate is None or site.private_key is None:
        return None
    key = serialization.load_ssh_private_key(site.private_key.read_bytes(), None)
    form = serialization.PrivateFormat.PKCS8
    return (
        key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()),
        site.certificate.read_bytes(),
    )
