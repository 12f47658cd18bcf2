"""Hosts in network namespaces of this process's own, joined by lines with a delay, a rate and losses.

The kernel's netem does the same, but is not in every kernel. A line is two TUN devices, one in the coordinator's
namespace and one in the site's, and a process that carries packets between them: each waits until the packets before it
have left at the line's rate, then travels for half a round trip; some are lost. Both ends run the kernel's own TCP. No
namespace has a name or a way out; all are gone with the processes in them.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import signal
import struct
import subprocess
import time
from dataclasses import dataclass
from types import TracebackType

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NET, _SET_TUN, _TUN, _NO_HEADER = 0x40000000, 0x400454CA, 0x0001, 0x1000
_PR_SET_PDEATHSIG = 1
_LINE = struct.Struct("3d")
QUEUE = 0.5  # seconds of packets that a router keeps before it drops the next


@dataclass(frozen=True)
class Line:
    """A round trip in milliseconds, a rate in Mbit/s each way (0: none), and the share of packets that are lost."""

    trip: float = 0.0
    rate: float = 0.0
    loss: float = 0.0

    def __str__(self) -> str:
        rate = f"{self.rate:g} Mbit/s" if self.rate else "no limit"
        return f"{self.trip:g} ms, {rate}" + (f", {self.loss:.1%} lost" if self.loss else "")


def _call(function: str, *arguments: int) -> None:
    if getattr(_LIBC, function)(*arguments):
        raise OSError(ctypes.get_errno(), f"{function} failed: network namespaces need root")


def _tun(name: str) -> int:
    """A TUN device in this thread's namespace."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_TUN, struct.pack("16sH22x", name.encode(), _TUN | _NO_HEADER))
    return device


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _here() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


class Hosts:
    """A coordinator, which is this process from now on, and sites, each at the end of a line of its own."""

    def __init__(self, sites: int) -> None:
        _call("unshare", _NEW_NET)
        coordinator, ends = _here(), list[tuple[int, int]]()
        _ip("link", "set", "lo", "up")
        near = [self._device(f"line{number}", f"10.88.{number}.1", f"10.88.{number}.2") for number in range(sites)]
        self.spaces = []
        for number in range(sites):
            _call("unshare", _NEW_NET)
            self.spaces.append(_here())
            _ip("link", "set", "lo", "up")
            ends.append((near[number], self._device("eth0", f"10.88.{number}.2", f"10.88.{number}.1")))
        _call("setns", coordinator, _NEW_NET)
        told, self.control = os.pipe()
        self.carrier = os.fork()
        if self.carrier == 0:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            try:
                _carry(ends, told)
            finally:
                os._exit(1)
        for one, two in ends:
            os.close(one)
            os.close(two)

    def change(self, line: Line) -> None:
        """Make every line such a one."""
        os.write(self.control, _LINE.pack(line.trip, line.rate, line.loss))

    @staticmethod
    def _device(name: str, own: str, peer: str) -> int:
        device = _tun(name)
        _ip("address", "add", own, "peer", peer, "dev", name)
        _ip("link", "set", name, "mtu", "1500", "up")
        return device

    @staticmethod
    def address(number: int) -> str:
        """Where site `number` reaches the coordinator."""
        return f"10.88.{number}.1"

    def popen(self, number: int, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a command on a site's host."""

        def enter() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            _call("setns", self.spaces[number], _NEW_NET)

        return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, preexec_fn=enter)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.kill(self.carrier, signal.SIGKILL)
        os.waitpid(self.carrier, 0)
        for space in self.spaces:
            os.close(space)


def _carry(ends: list[tuple[int, int]], told: int) -> None:
    """Carry packets for ever, over lines as they are told."""
    line = Line()
    to = {one: two for pair in ends for one, two in (pair, pair[::-1])}
    free = dict.fromkeys(to, 0.0)  # when the packets before have left
    waiting: list[tuple[float, int, int, bytes]] = []
    chance, count, poll = random.Random(1), 0, select.poll()
    for device in (told, *to):
        poll.register(device, select.POLLIN)
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
        for device, _ in poll.poll(1000 * pause):
            if device == told:
                line = Line(*_LINE.unpack(os.read(told, _LINE.size)))
                continue
            while True:
                try:
                    packet = os.read(device, 2048)
                except BlockingIOError:
                    break
                now, count = time.monotonic(), count + 1
                if chance.random() < line.loss or free[device] - now > QUEUE:
                    continue
                free[device] = max(now, free[device]) + (8 * len(packet) / (1e6 * line.rate) if line.rate else 0.0)
                heapq.heappush(waiting, (free[device] + line.trip / 2000, count, to[device], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            *_, device, packet = heapq.heappop(waiting)
            try:
                os.write(device, packet)
            except OSError:
                continue  # the host is gone
