"""Frames on the gRPC stream: how one is cut into messages and put together again. Both ends of the stream use it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from fedstill.common.wire import Arrays, Facts, WireError, chunks, decode, encode

METHOD = "/fedstill.Exchange/Session"
CHUNK = 1 << 20
HEAD_LIMIT = 8 << 20
_PREFIX = struct.Struct("<4sBQIQ")  # magic, kind, number of the Ask, length of the head, length of the body
_MAGIC = b"FST1"

HELLO, WELCOME, READY, ASK, REPLY, ERROR, CLOSE = range(1, 8)


@dataclass(frozen=True)
class Frame:
    """One thing said on the stream."""

    kind: int
    number: int = 0
    arrays: Arrays = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)


def grpc_options(keep_alive: float) -> list[tuple[str, int]]:
    """Both ends ping an idle stream, so that a dead peer is noticed and no middlebox forgets the connection."""
    milliseconds = int(keep_alive * 1000)
    return [
        ("grpc.max_receive_message_length", _PREFIX.size + HEAD_LIMIT + CHUNK),
        ("grpc.max_send_message_length", _PREFIX.size + HEAD_LIMIT + CHUNK),
        ("grpc.keepalive_time_ms", milliseconds),
        ("grpc.keepalive_timeout_ms", milliseconds // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", milliseconds // 4),
        ("grpc.http2.min_ping_interval_without_data_ms", milliseconds // 4),
        ("grpc.so_reuseport", 0),
    ]


def check_travels(frame: Frame, limit: int) -> None:
    """Refuse a frame that cannot be sent before it is queued: while it is being sent it would break the connection."""
    head, buffers = encode(frame.arrays, frame.facts)
    body = sum(len(buffer) for buffer in buffers)
    if len(head) > HEAD_LIMIT:
        raise WireError(f"settings or metrics of {len(head):,} bytes, more than {HEAD_LIMIT:,}: send them as an array")
    if body > limit:
        raise WireError(f"arrays of {body:,} bytes, more than the {limit:,} allowed; raise exchange.max_frame_mb")


def cut(frame: Frame) -> Iterator[bytes]:
    """The messages of a frame, made one at a time as gRPC's flow control takes them."""
    head, buffers = encode(frame.arrays, frame.facts)
    body = sum(len(buffer) for buffer in buffers)
    prefix = _PREFIX.pack(_MAGIC, frame.kind, frame.number, len(head), body)
    return chunks(head, buffers, prefix, CHUNK)


def join(messages: Iterable[bytes], limit: int, count: Callable[[int], None]) -> Iterator[Frame]:
    """The frames in a stream of messages; one that is malformed or longer than `limit` raises WireError."""
    arriving = iter(messages)
    for message in arriving:
        count(len(message))
        if len(message) < _PREFIX.size:
            raise WireError("a message is too short to begin a frame")
        magic, kind, number, head_length, body_length = _PREFIX.unpack_from(message)
        if magic != _MAGIC or not HELLO <= kind <= CLOSE:
            raise WireError("a message does not begin a frame of this protocol; do both sides run the same release?")
        if head_length > HEAD_LIMIT or body_length > limit:
            raise WireError(
                f"a frame announces {head_length + body_length:,} bytes, more than the {limit:,} allowed here; "
                "raise exchange.max_frame_mb if that is meant"
            )
        begin = _PREFIX.size + head_length
        if len(message) < begin:
            raise WireError("the head of a frame is cut off")
        body = _collect(memoryview(message)[begin:], body_length, arriving, count)
        arrays, facts = decode(message[_PREFIX.size : begin], body)
        yield Frame(kind, number, arrays, facts)


def _collect(first: memoryview, length: int, arriving: Iterator[bytes], count: Callable[[int], None]) -> memoryview:
    """The body of a frame: the rest of its first message, and as many more messages as it needs."""
    if len(first) == length:
        return first
    body = np.empty(length, np.uint8).data  # pages are taken only as bytes arrive
    at = len(first)
    if at > length:
        raise WireError("a frame is longer than it announced")
    body[:at] = first
    while at < length:
        message = next(arriving, None)
        if message is None:
            raise WireError("the stream ended inside a frame")
        count(len(message))
        if not message or at + len(message) > length:
            raise WireError("a frame is longer than it announced")
        body[at : at + len(message)] = message
        at += len(message)
    return body
