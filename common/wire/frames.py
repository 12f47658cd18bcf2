"""Frames on the gRPC stream: cutting into messages and reassembly. Both ends of the stream use it."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from fedstill.common.states import State
from fedstill.common.wire.encoding import HEAD_LIMIT, Facts, Packed, chunks, decode, describe, encode
from fedstill.common.wire.errors import WireError
from fedstill.common.wire.spool import Spool, SpooledState

METHOD = "/fedstill.Exchange/Session"
TOKEN = "fedstill-token"  # the call's metadata has it: who has none is turned away before a thread is taken
CHUNK = 1 << 20
WINDOW = 8 << 20  # bytes in flight per stream; at a 100 ms round trip still 80 MB/s
WINDOWS = 32 << 20  # of all streams of a server together
DOOR_LIMIT = 1 << 20  # head and body of a frame from a caller not yet identified
_PREFIX = struct.Struct("<4sBQIQ")  # magic, kind, number of the Ask, length of the head, length of the body
_MAGIC = b"FST1"

HELLO, WELCOME, READY, ASK, REPLY, ERROR, CLOSE = range(1, 8)


@dataclass(frozen=True)
class Frame:
    """One message on the stream."""

    kind: int
    number: int = 0
    arrays: State = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)

    @cached_property
    def packed(self) -> Packed:
        """The encoded content, computed once however often it is measured and sent."""
        return encode(self.arrays, self.facts)

    @classmethod
    def of(cls, kind: int, number: int, packed: Packed) -> Frame:
        """Build a frame from content that is already encoded."""
        frame = cls(kind, number)
        frame.__dict__["packed"] = packed
        return frame


def window(streams: int) -> int:
    """Return a stream's window: many streams share one budget, so that memory does not grow with the sites."""
    return max(1 << 20, min(WINDOW, WINDOWS // streams))


def grpc_options(keep_alive: float, streams: int = 1) -> list[tuple[str, int]]:
    """Return gRPC options: both ends ping an idle stream, so that a dead peer is noticed and no middlebox drops it."""
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
        # with its own estimate, gRPC buffers far more than a busy reader reads
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", window(streams)),
    ]


def check_travels(frame: Frame, limit: int) -> None:
    """Refuse a frame that cannot be sent before it is queued: failing while sending would break the connection."""
    head, buffers = frame.packed
    body = sum(len(buffer) for buffer in buffers)
    if len(head) > HEAD_LIMIT:
        raise WireError(f"settings or metrics of {len(head):,} bytes, more than {HEAD_LIMIT:,}: send them as an array")
    if body > limit:
        raise WireError(f"arrays of {body:,} bytes, more than the {limit:,} allowed; raise exchange.max_frame_mb")


def cut(frame: Frame) -> Iterator[bytes]:
    """Yield the messages of a frame, one at a time as gRPC's flow control takes them."""
    head, buffers = frame.packed
    body = sum(len(buffer) for buffer in buffers)
    prefix = _PREFIX.pack(_MAGIC, frame.kind, frame.number, len(head), body)
    return chunks(head, buffers, prefix, CHUNK)


def join(
    messages: Iterable[bytes],
    limit: int | Callable[[], int],
    count: Callable[[int], None],
    spool: Spool | None = None,
    head_limit: int = HEAD_LIMIT,
) -> Iterator[Frame]:
    """Yield the frames in a stream of messages; one that is malformed or longer than `limit` raises WireError.

    The limit may change from frame to frame: it is what the Ask in work allows.

    With a spool, the body of a large frame is written to disk as it arrives, and its arrays are read one at a time.
    """
    arriving = iter(messages)
    for message in arriving:
        count(len(message))
        if len(message) < _PREFIX.size:
            raise WireError("a message is too short to begin a frame")
        magic, kind, number, head_length, body_length = _PREFIX.unpack_from(message)
        if magic != _MAGIC or not HELLO <= kind <= CLOSE:
            raise WireError("a message does not begin a frame of this protocol; do both sides run the same release?")
        most = limit if isinstance(limit, int) else limit()
        if head_length > head_limit:
            raise WireError(f"a frame announces a head of {head_length:,} bytes, more than the {head_limit:,} allowed")
        if body_length > most:
            raise WireError(
                f"a frame announces {body_length:,} bytes, more than the {most:,} allowed here; "
                "raise exchange.max_frame_mb if that is meant"
            )
        begin = _PREFIX.size + head_length
        if len(message) < begin:
            raise WireError("the head of a frame is cut off")
        head, first = message[_PREFIX.size : begin], memoryview(message)[begin:]
        pieces = _body(first, body_length, arriving, count)
        if spool is not None and body_length > spool.above:
            yield Frame(kind, number, *_to_disk(head, pieces, body_length, spool))
        else:
            yield Frame(kind, number, *decode(head, _collect(first, pieces, body_length)))


def _body(
    first: memoryview, length: int, arriving: Iterator[bytes], count: Callable[[int], None]
) -> Iterator[bytes | memoryview]:
    """Yield the body of a frame: the rest of its first message, and as many more messages as it needs."""
    at = len(first)
    if at > length:
        raise WireError("a frame is longer than it announced")
    yield first
    while at < length:
        message = next(arriving, None)
        if message is None:
            raise WireError("the stream ended inside a frame")
        count(len(message))
        at += len(message)
        if not message or at > length:
            raise WireError("a frame is longer than it announced")
        yield message


def _collect(first: memoryview, pieces: Iterable[bytes | memoryview], length: int) -> memoryview:
    """Collect a body in memory."""
    if len(first) == length:
        return first
    # Pages are allocated only as bytes arrive; numpy would ask for huge pages, and the kernel stalls to find them.
    body = memoryview(mmap.mmap(-1, length))
    at = 0
    for piece in pieces:
        body[at : at + len(piece)] = piece
        at += len(piece)
    return body


def _to_disk(head: bytes, pieces: Iterable[bytes | memoryview], length: int, spool: Spool) -> tuple[State, Facts]:
    """Write a body to disk, after checking its head."""
    places, facts = describe(head, length)
    try:
        file = spool.open()
        for piece in pieces:
            file.write(piece)
        file.flush()
    except OSError as error:
        raise WireError(
            f"a frame of {length:,} bytes cannot be kept on disk ({error.strerror}); free some space where "
            f"{spool.folder or 'temporary files'} lies"
        ) from None
    return SpooledState(file, places), facts
