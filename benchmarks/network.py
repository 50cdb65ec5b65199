"""Network namespaces on one machine, joined by links of a chosen speed: a computer for each process of a benchmark.

Each namespace has one interface, eth0, with the address 10.77.0.K. Links without a limit are veth pairs on a bridge.
Links with one are TUN devices: the kernel's token bucket filter (`tc ... tbf`) holds each end to its speed, and a
thread here carries the packets from one to the other, each after the delay. Rejected: `tc ... netem` for the delay,
which kernels of small virtual machines do not have. The thread takes part of a core while packets of 1,500 bytes go
from end to end at 100 Mbit/s, and nothing while steps compute.

Everything is gone when the `with` ends, however it does: names hold the id of the process.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from types import TracebackType

INTERFACE = "eth0"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_DESTINATION = slice(16, 20)  # of an IPv4 header
_QUEUE = 5000  # packets that an interface holds until they are read


class NetworkRefusedError(RuntimeError):
    """This machine does not allow such a network; the message says what would."""


class Network:
    """`count` namespaces that reach each other over IPv4, for a `with` statement.

    mbit: speed of each end in each direction, in Mbit/s; None: no limit, and no delay.
    delay_ms: of each packet on its way, in milliseconds; a round trip takes two.
    """

    def __init__(self, count: int, mbit: float | None = None, delay_ms: float = 0.0) -> None:
        self.count, self.mbit, self.delay = count, mbit, delay_ms / 1e3
        self.spaces = [f"comera-{os.getpid()}-{k}" for k in range(count)]
        self._made = ExitStack()

    def __enter__(self) -> Network:
        with self._made:  # until all is made, an error removes it
            for space in self.spaces:
                self._add_space(space)
            if self.mbit is None:
                self._join_by_bridge()
            else:
                self._join_by_wire(self.mbit)
            for k, space in enumerate(self.spaces):
                # no IPv6: the first packets would be its own
                _run("ip", "-n", space, "link", "set", INTERFACE, "addrgenmode", "none")
                _run("ip", "-n", space, "address", "add", f"{self.address(k)}/24", "dev", INTERFACE)
                _run("ip", "-n", space, "link", "set", INTERFACE, "up")
            self._made = self._made.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._made.close()

    def address(self, k: int) -> str:
        """Of the k-th namespace."""
        return f"10.77.0.{k + 1}"

    def command(self, k: int, *command: str) -> list[str]:
        """`command`, run in the k-th namespace."""
        return ["ip", "netns", "exec", self.spaces[k], *command]

    def _add_space(self, space: str) -> None:
        self._made.callback(_run, "ip", "netns", "del", space, check=False)
        _run("ip", "netns", "add", space)
        _run("ip", "-n", space, "link", "set", "lo", "up")

    def _join_by_bridge(self) -> None:
        """A veth pair from each namespace to a bridge in one of its own."""
        hub = f"comera-{os.getpid()}-hub"
        self._add_space(hub)
        _run("ip", "-n", hub, "link", "add", "hub", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "hub", "up")
        for k, space in enumerate(self.spaces):
            _run("ip", "-n", hub, "link", "add", f"to{k}", "type", "veth", "peer", "name", INTERFACE, "netns", space)
            _run("ip", "-n", hub, "link", "set", f"to{k}", "master", "hub")
            _run("ip", "-n", hub, "link", "set", f"to{k}", "up")

    def _join_by_wire(self, mbit: float) -> None:
        """A TUN device in each namespace, the other ends of which a thread holds."""
        rate = ("rate", f"{mbit:g}mbit", "burst", "32kb", "latency", "200ms")
        ends = []
        for k, space in enumerate(self.spaces):
            name = f"cm{os.getpid()}n{k}"  # until it is in its namespace
            ends.append(_tun(name))
            self._made.callback(os.close, ends[-1])
            _run("ip", "link", "set", name, "netns", space, "name", INTERFACE)
            _run("ip", "-n", space, "link", "set", INTERFACE, "txqueuelen", str(_QUEUE))
            _run("tc", "-n", space, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *rate)
        wire = _Wire({bytes(map(int, self.address(k).split("."))): end for k, end in enumerate(ends)}, self.delay)
        wire.start()
        self._made.callback(wire.stop)


class _Wire(threading.Thread):
    """Carries packets between the ends of TUN devices, each a fixed time after it was read.

    ends: address of a namespace -> the descriptor of its device.
    """

    def __init__(self, ends: dict[bytes, int], delay: float) -> None:
        super().__init__(daemon=True)
        self.ends, self.delay = ends, delay
        self.wake, self._waker = os.pipe()

    def run(self) -> None:
        """Until `stop`."""
        with suppress(PermissionError):  # ahead of the programs that it serves, which want every core
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        due = deque[tuple[float, bytes]]()
        watched = [*self.ends.values(), self.wake]
        while True:
            wait = max(0.0, due[0][0] - time.monotonic()) if due else None
            ready, _, _ = select.select(watched, [], [], wait)
            if self.wake in ready:
                return
            for end in ready:
                with suppress(OSError):  # nothing more to read, or an interface that is down
                    for _ in range(64):
                        packet = os.read(end, 65536)
                        due.append((time.monotonic() + self.delay, packet))
            while due and due[0][0] <= time.monotonic():
                packet = due.popleft()[1]
                end = self.ends.get(packet[_DESTINATION], -1)
                with suppress(OSError):  # to nobody, or to an interface that is down: lost, as on any wire
                    os.write(end, packet)

    def stop(self) -> None:
        """End the thread."""
        os.write(self._waker, b"x")
        self.join()
        os.close(self.wake)
        os.close(self._waker)


def _tun(name: str) -> int:
    """The descriptor of a new TUN device, which is gone when that is closed."""
    try:
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NetworkRefusedError(
            f"/dev/net/tun does not open ({error.strerror}): load the kernel's module tun (modprobe tun), and give a "
            "container this device (--device /dev/net/tun)"
        ) from error
    try:
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError as error:
        os.close(end)
        raise NetworkRefusedError(f"no TUN device could be made ({error.strerror}): run this as root") from error
    return end


def _run(program: str, *arguments: str, check: bool = True) -> None:
    """Run `ip` or `tc`; in a session of its own, so that Ctrl-C does not stop what removes a network."""
    if shutil.which(program) is None:
        raise NetworkRefusedError(f"the program {program} is missing: install iproute2, and have its folder in PATH")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, start_new_session=True)
    if check and done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NetworkRefusedError(
            f"`{program} {' '.join(arguments)}` failed ({said[-1] if said else done.returncode}): run this as root, "
            "in a container with --privileged, on a kernel with network namespaces, veth, bridge, tun and tbf"
        )
