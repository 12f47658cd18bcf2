"""Checkpoints at the site, asked for by the server so that both keep the same rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstill.client.verbs.registry import Answer, verb
from fedstill.common import checkpoint
from fedstill.common.wire import Ask

if TYPE_CHECKING:
    from fedstill.client.node import Node


@verb("query.save")
def save(node: Node, ask: Ask) -> Answer:
    """Put the model and its optimizers away as the checkpoint of a round."""
    number = int(ask.settings["number"])
    checkpoint.save(node.folder / "checkpoints", number, node.state(), {"site": node.name, "round": number})
    return {}, {}


@verb("query.restore")
def restore(node: Node, ask: Ask) -> Answer:
    """Take up the checkpoint of a round."""
    arrays, _ = checkpoint.load(node.folder / "checkpoints", int(ask.settings["number"]))
    node.load_state(arrays)
    node.pending = None
    return {}, {}
