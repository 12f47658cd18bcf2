"""The messages between server and sites, how they are checked, and how they are encoded.

`messages` has Ask and Reply, `checks` the tests of a Reply, `encoding` and `compression` the bytes, `frames` the
stream, `flower_records` plain Flower messages, `spool` large bodies on disk.
"""

from fedstill.common.states import Arrays
from fedstill.common.wire.checks import (
    all_of,
    check_every_reply,
    check_reply,
    class_counts,
    predictions,
    same_shapes,
    shaped,
)
from fedstill.common.wire.encoding import Facts, chunks, decode, describe, encode, size_of
from fedstill.common.wire.errors import WireError
from fedstill.common.wire.flower_records import from_records, to_records
from fedstill.common.wire.messages import Ask, Failure, Reply, items

__all__ = [
    "Arrays",
    "Ask",
    "Facts",
    "Failure",
    "Reply",
    "WireError",
    "all_of",
    "check_every_reply",
    "check_reply",
    "chunks",
    "class_counts",
    "decode",
    "describe",
    "encode",
    "from_records",
    "items",
    "predictions",
    "same_shapes",
    "shaped",
    "size_of",
    "to_records",
]
