"""Two nodes on one machine: network namespaces with an address each, and a wire, a veth pair, between them.

    node0, 10.77.0.1  eth0 ---- eth0  10.77.0.2, node1

Both ends of the wire are made inside the namespaces, so the machine's own network does not change. A namespace lives as
long as its keeper, a `cat` that ends with this process, however that ends. Needs root, util-linux and iproute2.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PYTHON_PATH, ROOT

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "eth0"
_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000  # linux/sched.h


class TwoNodes:
    """The two namespaces; a context manager, which ends all processes in them."""

    def __enter__(self) -> "TwoNodes":
        """Make both, or skip the test with the reason."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.__exit__)
            self._keepers: list[subprocess.Popen[str]] = []
            try:
                self._make()
            except FileNotFoundError as missing:
                pytest.skip(f"two network namespaces need {missing.filename}: apt-get install util-linux iproute2")
            except subprocess.CalledProcessError as failed:
                pytest.skip(f"two network namespaces need root: {failed.cmd} says {failed.stderr.strip()}")
            undo.pop_all()
        return self

    def _make(self) -> None:
        for node in range(2):
            keep = ["unshare", "--net", "--uts", "sh", "-c", f"hostname node{node} && echo made && exec cat"]
            keeper = subprocess.Popen(
                keep, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            self._keepers.append(keeper)
            assert keeper.stdout is not None
            if keeper.stdout.readline() != "made\n":
                raise subprocess.CalledProcessError(1, " ".join(keep), stderr=keeper.communicate()[1])
        ends = [str(keeper.pid) for keeper in self._keepers]
        _run("ip", "link", "add", INTERFACE, "netns", ends[0], "type", "veth", "peer", INTERFACE, "netns", ends[1])
        for node, address in enumerate(ADDRESSES):
            self.run(node, "ip", "address", "add", f"{address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                self.run(node, "ip", "link", "set", interface, "up")

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for keeper in self._keepers:
            keeper.kill()
            keeper.communicate()

    def processes(self) -> list[int]:
        """Return the ids of the processes in both namespaces, without the keepers."""
        keepers = [keeper.pid for keeper in self._keepers if keeper.poll() is None]
        inside = {os.readlink(f"/proc/{pid}/ns/net") for pid in keepers} - {os.readlink("/proc/self/ns/net")}
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns/net") in inside and int(entry.name) not in keepers:
                    found.append(int(entry.name))
        return found

    def _command(self, node: int, *argv: str) -> list[str]:
        return ["nsenter", "--net", "--uts", "--target", str(self._keepers[node].pid), *argv]

    def run(self, node: int, *argv: str) -> None:
        _run(*self._command(node, *argv))

    def start(self, node: int, output: Path, environ: dict[str, str], *argv: str) -> subprocess.Popen[bytes]:
        """Start a command on a node, in the repository's root, whose output goes to a file."""
        unset = ("TRITON_INTERPRET", "GLOO_SOCKET_IFNAME")
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        with output.open("wb") as file:
            return subprocess.Popen(
                self._command(node, *argv),
                cwd=ROOT,
                env=kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH} | environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def handles(self) -> list[str]:
        """Return the folder with each namespace's handles, for `enter`."""
        return [f"/proc/{keeper.pid}/ns" for keeper in self._keepers]

    def slow_down(self) -> str:
        """Let the wire carry 50 Mbit/s, after 1 ms if the kernel can delay; return which of both it does."""
        ways = {
            "50 Mbit/s, 1 ms": ("netem", "rate", "50mbit", "delay", "1ms"),
            "50 Mbit/s": ("tbf", "rate", "50mbit", "burst", "64kb", "latency", "500ms"),
        }
        for told, way in ways.items():
            with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
                for node in range(2):
                    self.run(node, "tc", "qdisc", "replace", "dev", INTERFACE, "root", *way)
                return told
        return "not slowed down: no tc, or neither netem nor tbf in this kernel"

    def cut(self) -> None:
        self.run(1, "ip", "link", "set", INTERFACE, "down")


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True)


def enter(handles: str) -> None:
    """Move this thread, and those that it starts from now on, to the node of these handles."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    for name, kind in (("net", _CLONE_NEWNET), ("uts", _CLONE_NEWUTS)):
        with Path(handles, name).open() as handle:
            if libc.setns(handle.fileno(), kind):
                raise OSError(ctypes.get_errno(), f"setns {handle.name}")


def sent_bytes() -> int:
    """Return how many bytes this thread's node has sent, with all headers."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (line,) = [line for line in lines if line.strip().startswith(f"{INTERFACE}:")]
    return int(line.split(":")[1].split()[8])
