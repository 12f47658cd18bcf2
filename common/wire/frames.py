"""Frames on the gRPC stream: cutting into messages and reassembly. Both ends of the stream use it."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fedstill.common.states import State
from fedstill.common.wire.encoding import (
    HEAD_LIMIT,
    Facts,
    Packed,
    chunks,
    decode,
    describe,
    encode,
    parse,
    to_text,
    views,
)
from fedstill.common.wire.errors import WireError
from fedstill.common.wire.heads import (
    BRIEF,
    FORM_LIMIT,
    Forms,
    NoForm,
    filled,
    outlined,
    read_varint,
    squeeze,
    unsqueeze,
    varint,
)
from fedstill.common.wire.spool import Spool, SpooledState

METHOD = "/fedstill.Exchange/Session"
TOKEN = "fedstill-token"  # the call's metadata has it: who has none is turned away before a thread is taken
CHUNK = 1 << 20
WINDOW = 8 << 20  # bytes in flight per stream; at a 100 ms round trip still 80 MB/s
WINDOWS = 16 << 20  # of all streams of a server together; at a 100 ms round trip 160 MB/s
DOOR_LIMIT = 1 << 20  # head and body of a frame from a caller not yet identified
PREFIX = 64  # most bytes before the head of a whole frame: magic, kind, number of the Ask, lengths of head and body
MAGIC = b"FST2"
FIRST_BRIEF = bytes([BRIEF])  # the lowest first byte of a frame that names its form
TEACHES = 0x80  # added to the kind of a whole frame whose form is remembered

HELLO, WELCOME, READY, ASK, REPLY, ERROR, CLOSE = range(1, 8)


Value = TypeVar("Value")


class Once(Generic[Value]):
    """A property computed on first access; unlike functools.cached_property before Python 3.12, without a lock."""

    def __init__(self, make: Callable[[Any], Value]) -> None:
        self._make, self.__doc__ = make, make.__doc__

    def __get__(self, instance: Any, owner: type) -> Value:
        value = instance.__dict__[self._make.__name__] = self._make(instance)
        return value


@dataclass(frozen=True)
class Frame:
    """One message on the stream."""

    kind: int
    number: int = 0
    arrays: State = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)

    @Once
    def packed(self) -> Packed:
        """The encoded content, computed once however often it is measured and sent."""
        return encode(self.arrays, self.facts)

    @Once
    def size(self) -> int:
        """The size in bytes of the arrays."""
        return sum(map(len, self.packed[1]))

    @Once
    def outline(self) -> tuple[Any, list[Any]] | None:
        """The number and the head as a form and its numbers; None if they are none."""
        try:
            return outlined([self.number, self.packed[0]])
        except NoForm:
            return None

    @Once
    def text(self) -> bytes:
        """The head as JSON, computed once however many sites get it."""
        return to_text(self.packed[0])


def window(streams: int) -> int:
    """Return a stream's window: many streams share one budget, so that memory does not grow with the sites."""
    return max(1 << 20, min(WINDOW, WINDOWS // streams))


def grpc_options(keep_alive: float, streams: int = 1) -> list[tuple[str, int]]:
    """Return gRPC options: both ends ping an idle stream, so that a dead peer is noticed and no middlebox drops it."""
    milliseconds = int(keep_alive * 1000)
    return [
        ("grpc.max_receive_message_length", PREFIX + 2 * HEAD_LIMIT + CHUNK),
        ("grpc.max_send_message_length", PREFIX + 2 * HEAD_LIMIT + CHUNK),
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
    if frame.outline is None and len(frame.text) > HEAD_LIMIT:  # what has an outline is short
        raise WireError(
            f"settings or metrics of {len(frame.text):,} bytes, more than {HEAD_LIMIT:,}: send them as an array"
        )
    if frame.size > limit:
        raise WireError(f"arrays of {frame.size:,} bytes, more than the {limit:,} allowed; raise exchange.max_frame_mb")


def cut(frame: Frame, forms: Forms | None = None) -> Iterable[bytes]:
    """Return the messages of a frame, one at a time as gRPC's flow control takes them; `forms` are of the stream."""
    head, buffers = head_of(frame, forms), frame.packed[1]
    if frame.size <= CHUNK:
        return (b"".join((head, *buffers)),)
    return chunks(head, buffers, CHUNK)


def head_of(frame: Frame, forms: Forms | None = None) -> bytes:
    """Return what comes before the body: the name of a form and new numbers, or a whole head, which may teach one."""
    kind, body = frame.kind, frame.size
    if forms is not None and kind in (ASK, REPLY) and body <= CHUNK and frame.outline is not None:
        outline, numbers = frame.outline
        brief = forms.brief(kind, outline, numbers)
        if brief is not None:
            return brief
        if not forms.full() and len(frame.text) <= FORM_LIMIT:
            forms.teach(kind, outline, numbers, checked=kind == ASK)
            kind |= TEACHES
    squeezed = squeeze(frame.text)
    return MAGIC + bytes([kind]) + varint(frame.number) + varint(len(squeezed)) + varint(body) + squeezed


def join(
    messages: Iterable[bytes],
    limit: int | Callable[[], int],
    count: Callable[[int], None],
    spool: Spool | None = None,
    head_limit: int = HEAD_LIMIT,
    begins: Callable[[int, int], None] = lambda kind, number: None,
) -> Iterator[Frame]:
    """Yield the frames in a stream of messages; one that is malformed or longer than `limit` raises WireError.

    The limit may change from frame to frame: it is what the Ask in work allows.

    With a spool, the body of a large frame is written to disk as it arrives, and its arrays are read one at a time.
    `begins` hears the kind and the number of a frame before its body is read.
    """
    arriving, forms, memory = iter(messages), Forms(), Memory()
    for message in arriving:
        count(len(message))
        most = limit if isinstance(limit, int) else limit()
        if message[:1] >= FIRST_BRIEF:
            yield _brief(message, forms, most)
            continue
        kind, number, begin, end, length = _prefix(message, most, head_limit)
        head, first = unsqueeze(message[begin:end], head_limit), memoryview(message)[end:]
        facts = parse(head)
        if kind & TEACHES:
            kind &= ~TEACHES
            _learn(forms, kind, number, facts, len(head))
        begins(kind, number)
        pieces = _body(first, length, arriving, count)
        if spool is not None and length > spool.above:
            yield Frame(kind, number, *_to_disk(facts, pieces, length, spool))
        else:
            yield Frame(kind, number, *decode(facts, _collect(first, pieces, length, memory)))


def _brief(message: bytes, forms: Forms, most: int) -> Frame:
    """Read a frame of a form that this stream has taught; it is one message."""
    view = memoryview(message)
    form, numbers, begin = forms.read(view)
    body = view[begin:]
    if len(body) > most or len(body) > CHUNK:
        raise WireError(f"a frame has {len(body):,} bytes, more than the {min(most, CHUNK):,} allowed here")
    described = numbers[1 : form.facts_at]
    if form.layout is not None and form.layout[0] == described and form.layout[1] == len(body):
        places, facts = form.layout[2], filled(form.facts, iter(numbers[form.facts_at :]))
    else:
        places, facts = describe(filled(form.outline, iter(numbers))[1], len(body))
        if form.facts_at:  # arrays of the same shapes need not be checked again
            form.layout = described, len(body), places
    return Frame(form.kind, numbers[0], views(body, places), facts)


def _prefix(message: bytes, most: int, head_limit: int) -> tuple[int, int, int, int, int]:
    """Return the kind and number of a whole frame, where its head lies, and how long its body is."""
    kinds = range(HELLO, CLOSE + 1)
    if message[:4] != MAGIC or len(message) < 5 or message[4] & ~TEACHES not in kinds:
        raise WireError("a message does not begin a frame of this protocol; do both sides run the same release?")
    number, at = read_varint(message, 5)
    head_length, at = read_varint(message, at)
    length, at = read_varint(message, at)
    if head_length > head_limit:
        raise WireError(f"a frame announces a head of {head_length:,} bytes, more than the {head_limit:,} allowed")
    if length > most:
        raise WireError(
            f"a frame announces {length:,} bytes, more than the {most:,} allowed here; "
            "raise exchange.max_frame_mb if that is meant"
        )
    if len(message) < at + head_length:
        raise WireError("the head of a frame is cut off")
    return message[4], number, at, at + head_length, length


def _learn(forms: Forms, kind: int, number: int, head: Facts, size: int) -> None:
    """Remember the form of a whole frame, as its sender did."""
    try:
        outline, numbers = outlined([number, head])
    except NoForm:
        raise WireError("a frame teaches a form that no head can have") from None
    if kind not in (ASK, REPLY) or forms.full() or size > FORM_LIMIT or forms.knows(kind, outline):
        raise WireError("a frame teaches a form that is too large, known already, or one too many")
    forms.teach(kind, outline, numbers, checked=kind == ASK)


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


class Memory:
    """Where large bodies are collected: the pages of the last one, once nobody holds an array of it.

    Fresh pages cost more than the copy into them; they are allocated only as bytes arrive.
    """

    KEPT = 1 << 30  # bytes; a larger body gets pages of its own

    def __init__(self) -> None:
        self._pages: mmap.mmap | None = None

    def take(self, length: int) -> memoryview:
        """Return room for a body of this length."""
        pages = self._pages if self._pages is not None and length <= len(self._pages) <= 4 * length else None
        self._pages = None
        if pages is not None:
            try:
                pages.resize(len(pages))  # fails while an array of the last body is alive
            except (BufferError, OSError, SystemError, ValueError):
                pages = None
        pages = mmap.mmap(-1, length) if pages is None else pages  # numpy would ask for huge pages, and wait for them
        self._pages = pages if len(pages) <= self.KEPT else None
        return memoryview(pages)[:length]


def _collect(first: memoryview, pieces: Iterable[bytes | memoryview], length: int, memory: Memory) -> memoryview:
    """Collect a body in memory."""
    if len(first) == length:
        return first
    body, at = memory.take(length), 0
    for piece in pieces:
        body[at : at + len(piece)] = piece
        at += len(piece)
    return body


def _to_disk(head: Facts, pieces: Iterable[bytes | memoryview], length: int, spool: Spool) -> tuple[State, Facts]:
    """Write a body to disk, after checking its head."""
    places, facts = describe(head, length)
    try:
        body = spool.open()
        for piece in pieces:
            body.write(piece)
        body.end(length)
    except OSError as error:
        raise WireError(
            f"a frame of {length:,} bytes cannot be kept on disk ({error.strerror}); free some space where "
            f"{spool.folder or 'temporary files'} lies"
        ) from None
    return SpooledState(body, places), facts
