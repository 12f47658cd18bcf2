"""The site's end of the stream: one session with the coordinator, across broken connections.

The site works on an Ask once. When the connection breaks, the session reconnects with its latest token. The coordinator
repeats an Ask that has no Reply; if the site has already answered it, the session sends the kept Reply again.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from fedstill.common.memory import keep_pages
from fedstill.common.wire import Ask, Facts, Reply, WireError
from fedstill.common.wire.frames import (
    ASK,
    CLOSE,
    ERROR,
    HELLO,
    METHOD,
    READY,
    REPLY,
    TOKEN,
    WELCOME,
    Frame,
    check_travels,
    cut,
    grpc_options,
    join,
)
from fedstill.common.wire.heads import Forms
from fedstill.common.wire.messages import without_items

REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INVALID_ARGUMENT,
)
BUSY = "Concurrent RPC limit"  # gRPC's words for a server whose streams are all in use: another try may do


class SessionRefused(RuntimeError):
    """The coordinator refused this site; the text is its reason."""


class SessionLost(RuntimeError):
    """The coordinator could not be reached again in time."""


@dataclass(frozen=True)
class Door:
    """The address of the coordinator's stream, and the token that admits this site."""

    address: str
    token: str
    root_certificates: Path | None = None
    pair: tuple[bytes, bytes] | None = None  # the site's own key and certificate, PEM
    limit: int = 1 << 31
    keep_alive: float = 20.0
    patience: float = 60.0


class Session:
    """Serves Asks until the coordinator closes the session."""

    def __init__(self, door: Door, greeting: Facts, answer: Callable[[Ask], Reply]) -> None:
        self.door = door
        self.greeting = greeting
        self.answer = answer
        self.token = door.token
        self.bytes_in = 0
        self.bytes_out = 0
        self.connections = 0
        self._answered: Frame | None = None  # the last Reply, kept until the next Ask shows that it arrived

    def serve(self) -> Facts:
        """Answer Asks until CLOSE; return its facts, which tell how the run ended."""
        keep_pages()
        broken_since: float | None = None
        wait = 0.2
        while True:
            served = self.connections
            try:
                return self._serve_connection()
            except grpc.RpcError as error:
                reason = _reason(error)
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    unknown = "the coordinator's stream does not know this site's token, or it is spent"
                    raise SessionRefused(unknown) from None
                if error.code() in REFUSALS and BUSY not in reason:
                    raise SessionRefused(reason) from None
            except WireError as error:
                reason = str(error)
            now = time.monotonic()
            if self.connections > served or broken_since is None:
                broken_since, wait = now, 0.2
            if now - broken_since > self.door.patience:
                raise SessionLost(
                    f"no connection to the coordinator's stream at {self.door.address} for {self.door.patience:.0f} s: "
                    f"{reason}. Check exchange.advertise, and that this site may open that port"
                )
            time.sleep(wait)
            wait = min(wait * 2, 5.0)

    def _serve_connection(self) -> Facts:
        outgoing: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        with self._channel() as channel:
            call = channel.stream_stream(METHOD)(self._messages(outgoing), metadata=((TOKEN, self.token),))
            outgoing.put(Frame(HELLO, facts=self.greeting))
            try:
                for frame in join(call, self.door.limit, self._count_in, begins=self._forget):
                    if frame.kind == CLOSE:
                        return frame.facts
                    self._respond(frame, outgoing)
                    del frame  # free its arrays before the next Ask arrives
            finally:
                outgoing.put(None)
                call.cancel()
        raise WireError("the coordinator ended the stream without a word")

    def _respond(self, frame: Frame, outgoing: queue.SimpleQueue[Frame | None]) -> None:
        if frame.kind == WELCOME:
            token = frame.facts.get("token")
            if not isinstance(token, str) or not token:
                raise WireError("the coordinator's welcome has no token for the next connection")
            self.connections += 1
            self.token = token
            outgoing.put(Frame(READY, facts={"token": self.token}))
        elif frame.kind == ASK:
            if self._answered is None or self._answered.number != frame.number:
                self._answered = None
                self._answered = self._work(frame)
            outgoing.put(self._answered)
        else:
            raise WireError(f"the coordinator sent a frame of kind {frame.kind}, which a site does not expect")

    def _work(self, frame: Frame) -> Frame:
        try:
            settings = frame.facts.get("settings", {})
            if not isinstance(settings, dict):
                raise WireError("the settings of an Ask are not a table")
            reply = self.answer(Ask(str(frame.facts.get("verb"))[:200], frame.arrays, settings))
            said = without_items(frame.arrays, reply.arrays)
            answer = Frame(REPLY, frame.number, said, {"metrics": reply.metrics})
            check_travels(answer, self.door.limit)
        except Exception as error:  # the coordinator leaves this site out of the step and logs why
            return Frame(ERROR, frame.number, facts={"reason": f"{type(error).__name__}: {error}"[:2000]})
        return answer

    def _messages(self, outgoing: queue.SimpleQueue[Frame | None]) -> Iterator[bytes]:
        forms = Forms()
        while (frame := outgoing.get()) is not None:
            for message in cut(frame, forms):
                self.bytes_out += len(message)
                yield message
            del frame

    def _channel(self) -> grpc.Channel:
        options = grpc_options(self.door.keep_alive)
        if self.door.root_certificates is None:
            return grpc.insecure_channel(self.door.address, options)
        credentials = grpc.ssl_channel_credentials(
            self.door.root_certificates.read_bytes(), *(self.door.pair or (None, None))
        )
        return grpc.secure_channel(self.door.address, credentials, options)

    def _forget(self, kind: int, number: int) -> None:
        """Free the last Reply as soon as another Ask begins to arrive: it may be as large as that Ask."""
        if kind == ASK and self._answered is not None and self._answered.number != number:
            self._answered = None

    def _count_in(self, size: int) -> None:
        self.bytes_in += size


def _reason(error: grpc.RpcError) -> str:
    return str(error.details() or error.code()) if isinstance(error, grpc.Call) else str(error)
