"""The server's end of the stream: seats for the sites, admission tokens, Asks out and Replies back."""

from __future__ import annotations

import hashlib
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import grpc

from fedstill.common.memory import give_back, one_heap
from fedstill.common.readable import plain
from fedstill.common.wire import Ask, Facts, Failure, Reply, WireError
from fedstill.common.wire.frames import (
    ASK,
    CLOSE,
    DOOR_LIMIT,
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
from fedstill.common.wire.messages import with_items
from fedstill.common.wire.spool import Spool
from fedstill.server.admission import why_no_name

Outbox = queue.SimpleQueue[Frame | None]
GREETING = 20.0  # seconds in which a caller must send HELLO: every stream holds a thread
STREAMS = 2  # of a seat at a time: a site may return before its old stream is noticed dead
PER_CONNECTION = 16  # streams of one connection
LOOK = 1.0  # seconds between two looks at who is gone
MOST_REASONS = 20  # of refusals that are counted apart
MOST_NOTICES = 1000  # refusals that are logged: callers could otherwise fill the disk


class ExchangeError(RuntimeError):
    """The exchange cannot be opened; the text says why and what to change."""


@dataclass
class Seat:
    """The server's record of one site: its name, its tokens, and the Ask that it still has to answer."""

    node_id: int
    current: str  # token digests: the one that admits the site ...
    offered: str | None = None  # ... and its successor, once the site has it
    name: str = ""
    greeting: Facts = field(default_factory=dict)
    outbox: Outbox | None = None
    unanswered: Frame | None = None
    lost_at: float | None = None
    dead: str | None = None
    asked_again: bool = False  # its node was invited again while it was away
    anew: bool = False  # a new process of the site, which does not know the run yet
    call: grpc.ServicerContext | None = None  # the stream in use
    streams: int = 0  # that hold a thread
    writing: float | None = None  # since when a message waits to be taken
    room: int = DOOR_LIMIT  # most bytes of a frame's body: what was asked of it so far allows
    bytes_up: int = 0
    bytes_down: int = 0


class Doorkeeper(grpc.ServerInterceptor):  # type: ignore[misc]
    """Turns away calls without a valid token, in gRPC's own thread: they take none of the sites' threads."""

    def __init__(self, may_enter: Callable[[str], bool]) -> None:
        self.may_enter = may_enter

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Return the handler of a call, or None: gRPC then says that there is no such method."""
        token = dict(details.invocation_metadata or ()).get(TOKEN, "")
        return continuation(details) if self.may_enter(str(token)) else None


class Exchange:
    """A gRPC server with one bidirectional stream per site."""

    def __init__(
        self,
        listen: str,
        admit: Callable[[Facts], str | None],
        *,
        limit: int = 1 << 31,
        keep_alive: float = 20.0,
        patience: float = 60.0,
        write_deadline: float = 60.0,
        certificate: Path | None = None,
        key: Path | None = None,
        authority: Path | None = None,
        most_sites: int = 64,
        spool: Spool | None = None,
        notice: Callable[[str, Facts], None] = lambda kind, facts: None,
        bound: Callable[[int, str], str | None] = lambda node, name: None,
    ) -> None:
        self.admit, self.limit, self.patience, self.notice = admit, limit, patience, notice
        self.bound = bound  # returns why a node may not use a name
        self.mutual, self.write_deadline = authority is not None, write_deadline
        self.spool = spool or Spool()
        self.by_name: dict[str, Seat] = {}
        self._by_token: dict[str, Seat] = {}
        self._lock = threading.Lock()
        self._arrivals: queue.SimpleQueue[tuple[Seat, Frame]] = queue.SimpleQueue()
        self._seated = threading.Condition(self._lock)
        self._number = 0
        self._refusals = 0
        self.refusals: Counter[str] = Counter()  # by reason
        self._closed = False
        self._ended = threading.Event()
        one_heap()
        threads = STREAMS * most_sites + 8  # a stream holds its thread
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="exchange")
        self._server = grpc.server(
            self._pool,
            interceptors=(Doorkeeper(self._may_enter),),
            options=[*grpc_options(keep_alive, most_sites), ("grpc.max_concurrent_streams", PER_CONNECTION)],
            maximum_concurrent_rpcs=threads,
        )
        handler = grpc.stream_stream_rpc_method_handler(self._session)
        service, method = METHOD.strip("/").split("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self.port = self._bind(listen, certificate, key, authority)
        self.secure = certificate is not None
        self._server.start()
        threading.Thread(target=self._watch_writes, name="exchange-writes", daemon=True).start()

    def _bind(self, listen: str, certificate: Path | None, key: Path | None, authority: Path | None) -> int:
        try:
            if certificate is None:
                if authority is not None:
                    raise ExchangeError("exchange.authority is set but exchange.certificate is not")
                port = self._server.add_insecure_port(listen)
            else:
                if key is None:
                    raise ExchangeError("exchange.certificate is set but exchange.key is not")
                pair = (key.read_bytes(), certificate.read_bytes())
                roots = None if authority is None else authority.read_bytes()
                credentials = grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)
                port = self._server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            if isinstance(error, ExchangeError):
                raise
            port = 0
        except OSError as error:
            raise ExchangeError(f"{error.filename}: cannot be read ({error.strerror})") from None
        if port == 0:
            raise ExchangeError(
                f"the stream cannot listen on {listen}: the port is in use or the address is not this machine's; "
                "set exchange.listen to another one (port 0 takes any free port)"
            )
        return int(port)

    # --- admission ---

    def issue_token(self, node_id: int) -> str:
        """Issue a new seat's token; the first caller that shows it takes the seat."""
        token = secrets.token_urlsafe(32)
        with self._lock:
            self._by_token[_digest(token)] = Seat(node_id, _digest(token))
        return token

    def _may_enter(self, token: str) -> bool:
        """Return whether a call with this token gets a thread; a refusal is noted."""
        with self._lock:
            known = _digest(token) in self._by_token
        if not known:
            self._refused({"reason": "unknown or spent token"})
        return known

    def wait_for(self, count: int, seconds: float) -> bool:
        """Wait until `count` sites have taken their seats, for at most `seconds`; return whether they have."""
        with self._seated:
            return self._seated.wait_for(lambda: len(self.by_name) >= count, seconds)

    def give_up(self, node_id: int, reason: str) -> None:
        """Mark a node's site dead because Flower reports its session over; a site with an open stream is left alone."""
        with self._lock:
            seats = [seat for seat in self.by_name.values() if seat.node_id == node_id and seat.outbox is None]
            for seat in seats:
                seat.dead = reason

    def present(self, node_id: int) -> bool:
        """Return whether a site of this node has a stream."""
        with self._lock:
            return any(seat.node_id == node_id and seat.outbox is not None for seat in self.by_name.values())

    def asked_again(self, node_id: int) -> None:
        """Note that a node whose site has no stream is invited again."""
        with self._lock:
            for seat in self.by_name.values():
                seat.asked_again = seat.asked_again or seat.node_id == node_id

    def returned(self) -> dict[str, Facts]:
        """Return the greetings of sites that restarted since the last call, and readmit them."""
        with self._lock:
            seats = [seat for seat in self.by_name.values() if seat.anew]
            for seat in seats:
                seat.anew = False
        return {seat.name: seat.greeting for seat in seats}

    def _refused(self, facts: Facts) -> None:
        self._refusals += 1
        reason = plain(facts.get("reason", ""), 60)
        self.refusals[reason if reason in self.refusals or len(self.refusals) < MOST_REASONS else "other"] += 1
        facts = {name: plain(value) for name, value in facts.items()}
        if self._refusals <= MOST_NOTICES:
            last = {"note": "no more refusals are written down"} if self._refusals == MOST_NOTICES else {}
            self.notice("refused", {**facts, **last})

    def _why_not(self, seat: Seat, facts: Facts) -> str | None:
        """Return why the holder of a valid token is not admitted under its name, or None."""
        name = facts.get("name")
        if (reason := why_no_name(name)) is not None or not isinstance(name, str):
            return reason
        if seat.name:
            return None if seat.name == name else f"this token is another site's than {name}'s"
        reason = self.bound(seat.node_id, name) or self.admit(facts)
        if reason is not None:
            return reason
        with self._lock:
            other = self.by_name.get(name)
            taken = other is not None and other.dead is None and other.outbox is not None
            if taken and other is not None and other.node_id != seat.node_id:
                return f"site {name} is here already: give every site a name of its own"
        return None

    def _take_seat(self, seat: Seat, token: str, hello: Frame, context: grpc.ServicerContext) -> str:
        """Seat the site that sent HELLO and return the token of its next connection, or abort the call."""
        facts = hello.facts
        with self._lock:
            spent = self._by_token.get(_digest(token)) is not seat
        if hello.kind != HELLO or spent:
            self._refused({"reason": "unknown or spent token", "peer": context.peer()})
            _abort(context, grpc.StatusCode.UNAUTHENTICATED, "this token is spent, or the first frame is no greeting")
        reason = self._why_not(seat, facts) or self._other_certificate(facts, context)
        if reason is not None:
            self._refused({"site": str(facts.get("name"))[:64], "reason": reason[:2000]})
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, reason[:2000])
        successor = secrets.token_urlsafe(32)
        with self._seated:
            if seat.offered is not None and _digest(token) == seat.offered:
                self._by_token.pop(seat.current, None)
                seat.current = seat.offered
            elif seat.offered is not None:
                self._by_token.pop(seat.offered, None)
            seat.offered = _digest(successor)
            self._by_token[seat.offered] = seat
            if not seat.name:
                seat.name, seat.greeting = str(facts["name"]), facts
                self._follow(self.by_name.get(seat.name), seat)
                self.by_name[seat.name] = seat
            self._seated.notify_all()
        return successor

    def _other_certificate(self, facts: Facts, context: grpc.ServicerContext) -> str | None:
        """Return why a caller's certificate does not fit its name, or None."""
        if not self.mutual:
            return None
        shown = [name.decode(errors="replace") for name in context.auth_context().get("x509_common_name", [])]
        if shown == [facts["name"]]:
            return None
        return f"its certificate is of {', '.join(shown) or 'nobody'} and it calls itself {facts['name']}"

    def _follow(self, old: Seat | None, seat: Seat) -> None:
        """Replace a site that has restarted: void its old seat and tokens, and fail the Ask it had not answered."""
        if old is None:
            return
        seat.anew, seat.bytes_up, seat.bytes_down = True, old.bytes_up, old.bytes_down
        seat.room = old.room
        old.dead = "it began anew and knows nothing of this step"
        for token in (old.current, old.offered):
            self._by_token.pop(token or "", None)
        if old.outbox is not None:
            old.outbox.put(None)
        if old.call is not None:
            old.call.cancel()

    def _watch_writes(self) -> None:
        """Cancel streams whose site does not read what it is sent: each would hold its thread for ever."""
        while not self._ended.wait(min(1.0, self.write_deadline / 4)):
            now = time.monotonic()
            with self._lock:
                seats = list(self.by_name.values())
                stuck = [s for s in seats if s.writing is not None and now - s.writing > self.write_deadline]
            for seat in stuck:
                seat.writing = None
                self._refused({"site": seat.name, "reason": f"it has not read for {self.write_deadline:.0f} s"})
                if seat.call is not None:
                    seat.call.cancel()

    # --- one stream ---

    def _session(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        token = str(dict(context.invocation_metadata()).get(TOKEN, ""))
        with self._lock:
            seat = self._by_token.get(_digest(token))
            crowded = seat is not None and seat.streams >= STREAMS
            if seat is not None and not crowded:
                seat.streams += 1
        if seat is not None and crowded and seat.call is not None:
            seat.call.cancel()  # whoever has the newest token is the site; it tries again at once
        if seat is None or crowded:
            _abort(context, grpc.StatusCode.UNAVAILABLE, "this token is in use by other streams")
        try:
            yield from self._served(seat, token, requests, context)
        finally:
            with self._lock:
                seat.streams -= 1

    def _served(
        self, seat: Seat, token: str, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Yield what goes to a site: first the greetings, then Asks, until either end has enough."""

        def count(size: int) -> None:
            seat.bytes_up += size

        silence = threading.Timer(GREETING, context.cancel)
        silence.daemon = True
        silence.start()
        try:
            hello = next(join(requests, min(self.limit, DOOR_LIMIT), count, head_limit=DOOR_LIMIT))
        except WireError as error:
            self._refused({"reason": str(error), "peer": context.peer()})
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except StopIteration:
            return
        finally:
            silence.cancel()
        successor = self._take_seat(seat, token, hello, context)
        frames = join(requests, lambda: seat.room, count, self.spool)
        outbox: Outbox = queue.SimpleQueue()
        outbox.put(Frame(WELCOME, facts={"token": successor}))
        refusal: list[str] = []
        with self._lock:
            replaced, replaced_call = seat.outbox, seat.call
            seat.outbox, seat.call, seat.lost_at, seat.dead, seat.writing = outbox, context, None, None, None
            if seat.asked_again:  # it returned by itself: unused tokens sent meanwhile are void
                spare = [d for d, s in self._by_token.items() if s.node_id == seat.node_id and not s.name]
                for digest in spare:
                    del self._by_token[digest]
                seat.asked_again = False
            if seat.unanswered is not None:
                outbox.put(seat.unanswered)
        if replaced is not None:
            replaced.put(None)
        if replaced_call is not None:
            replaced_call.cancel()  # its thread may wait for a reader that is gone
        context.add_callback(lambda: outbox.put(None))
        threading.Thread(target=self._read, args=(seat, frames, outbox, refusal), daemon=True).start()
        forms = Forms()
        try:
            while (frame := outbox.get()) is not None:
                for message in cut(frame, forms):
                    seat.bytes_down += len(message)
                    seat.writing = time.monotonic()
                    yield message
                if seat.outbox is outbox:
                    seat.writing = None
                del frame  # free the sent state before the next Ask
        finally:
            with self._lock:
                if seat.outbox is outbox:
                    seat.outbox, seat.call, seat.lost_at, seat.writing = None, None, time.monotonic(), None
                    if not self._closed:
                        self.notice("disconnected", {"site": seat.name})
        if refusal:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, refusal[0])

    def _read(self, seat: Seat, frames: Iterator[Frame], outbox: Outbox, refusal: list[str]) -> None:
        try:
            for frame in frames:
                if frame.kind == READY:
                    self._confirm(seat, str(frame.facts.get("token", "")))
                elif frame.kind in (REPLY, ERROR):
                    with self._lock:
                        wanted = seat.unanswered is not None and seat.unanswered.number == frame.number
                        if wanted:
                            seat.unanswered = None
                    if wanted:
                        self._arrivals.put((seat, frame))
                else:
                    raise WireError(f"a site may not send a frame of kind {frame.kind}")
                del frame  # or its file would not be free for the next one
        except WireError as error:
            self._refused({"site": seat.name, "reason": str(error)})
            refusal.append(str(error))
        except Exception:  # gRPC raises a bare Exception when the call ends under its reader
            pass
        finally:
            outbox.put(None)

    def _confirm(self, seat: Seat, token: str) -> None:
        """Note that the site holds its next token: the previous one is spent."""
        with self._lock:
            if seat.offered is not None and secrets.compare_digest(_digest(token), seat.offered):
                self._by_token.pop(seat.current, None)
                seat.current, seat.offered = seat.offered, None

    # --- Asks and Replies ---

    def deliver(self, parts: dict[str, Ask], deadline: float) -> Iterator[Reply | Failure]:
        """Send each site its Ask; the iterator has the answers as they come, and a Failure for who is late or gone."""
        self._number += 1
        frames: dict[int, Frame] = {}  # one for all sites that are asked the same: it is encoded once
        for ask in parts.values():
            if id(ask) not in frames:
                frames[id(ask)] = frame = Frame(
                    ASK, self._number, ask.arrays, {"verb": ask.verb, "settings": ask.settings}
                )
                check_travels(frame, self.limit)
        waiting, doubtful = {name: self.by_name[name] for name in parts}, False
        with self._lock:
            for name, seat in waiting.items():
                room = parts[name].room
                # never less than before: a late answer to an earlier Ask may still come
                seat.room = max(seat.room, self.limit if room is None else min(room, self.limit))
                seat.unanswered = None if seat.anew else frames[id(parts[name])]
                if seat.outbox is not None and seat.unanswered is not None:
                    seat.outbox.put(seat.unanswered)
                else:
                    doubtful = True
        end = time.monotonic() + deadline
        return self._answers(parts, waiting, self._number, end, deadline, 0.0 if doubtful else end - deadline)

    def _answers(
        self, parts: dict[str, Ask], waiting: dict[str, Seat], number: int, end: float, deadline: float, looked: float
    ) -> Iterator[Reply | Failure]:
        """Yield answers; once a second, or when none is left to read, see who is gone. `looked`: when that was."""
        while waiting:
            arrived = self._arrived(min(looked + LOOK, end) - time.monotonic())
            if arrived is None:  # what has come counts, however late it is read
                looked = time.monotonic()
                for name in list(waiting):
                    reason = self._given_up(waiting[name], end, deadline)
                    if reason is not None:
                        with self._lock:
                            waiting.pop(name).unanswered = None
                        yield Failure(name, reason, gone=True)
                continue
            seat, frame = arrived
            if frame.number == number and waiting.get(seat.name) is seat:
                del waiting[seat.name]
                if not isinstance(frame.arrays, dict):  # on disk
                    give_back()  # memory that its messages took on their way to disk
                yield _outcome(seat.name, frame, parts[seat.name])

    def _arrived(self, seconds: float) -> tuple[Seat, Frame] | None:
        try:
            return self._arrivals.get(timeout=seconds) if seconds > 0 else self._arrivals.get_nowait()
        except queue.Empty:
            return None

    def _given_up(self, seat: Seat, end: float, deadline: float) -> str | None:
        now = time.monotonic()
        if seat.dead is not None:
            return seat.dead
        if seat.anew:
            return "it began anew and is let in again at the next round"
        if seat.outbox is None and seat.lost_at is not None and now - seat.lost_at > self.patience:
            return f"its connection broke and it did not come back within {self.patience:.0f} s"
        return f"no answer within {deadline:.0f} s" if now >= end else None

    def open_streams(self) -> int:
        """Return how many sites have an open stream."""
        with self._lock:
            return sum(seat.outbox is not None for seat in self.by_name.values())

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Return the bytes up and down of each site so far."""
        return {name: (seat.bytes_up, seat.bytes_down) for name, seat in self.by_name.items()}

    def close(self, facts: Facts) -> None:
        """Tell every site how the run ended and stop listening."""
        with self._lock:
            self._closed = True
            for seat in self.by_name.values():
                if seat.outbox is not None:
                    seat.outbox.put(Frame(CLOSE, facts=facts))
                    seat.outbox.put(None)
        self._server.stop(grace=5).wait(10)
        self._pool.shutdown(wait=False)  # gRPC leaves its threads to whoever made them
        self._ended.set()


def _outcome(name: str, frame: Frame, ask: Ask) -> Reply | Failure:
    if frame.kind == ERROR:
        return Failure(name, str(frame.facts.get("reason", "no reason given"))[:2000])
    metrics = frame.facts.get("metrics", {})
    if not isinstance(metrics, dict):
        return Failure(name, "its metrics are not a table")
    return Reply(name, with_items(ask.arrays, frame.arrays), metrics)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, reason: str) -> NoReturn:
    context.abort(code, reason)
    raise AssertionError("abort returns never")
