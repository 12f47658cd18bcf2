"""Sites' answers as Flower's own strategies read them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import Array, ArrayRecord, Message, Metadata, MetricRecord, RecordDict

from fedstill.common.states import State


def as_message(state: State, texts: int) -> Message:
    """A site's answer as Flower's rules read it; it never travels, so that it needs no addresses."""
    arrays = ArrayRecord({name: Array(value) for name, value in state.items()})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": texts})})
    made: Any = Message  # Flower's type hints leave out the way without a running task
    metadata = Metadata(
        run_id=0, message_id="", src_node_id=0, dst_node_id=0, reply_to_message_id="", group_id="",
        created_at=0.0, ttl=0.0, message_type="train",
    )  # fmt: skip
    message: Message = made(content=content, metadata=metadata)
    return message


@contextmanager
def quietly() -> Iterator[None]:
    """Without Flower's line for every call: there is one for each array."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
