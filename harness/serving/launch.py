"""Start a server, wait until it is well, and stop all of it, whatever becomes of this process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import ContractError
from harness.serving.client import Client

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.1
STOP_S = 30.0
LAST_LINES = 20


class NotReady(ContractError):
    """A server ended, or was not well by its deadline; the message shows the end of its log."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to start a server.

    Args:
        name: for people.
        argv: its command.
        url: where it will answer.
        env: added to this process's environment.
        ready_s: how long it may take to be well.
    """

    name: str
    argv: tuple[str, ...]
    url: str
    env: Mapping[str, str] = field(default_factory=dict)
    ready_s: float = 180.0


class Running:
    """A server that was started.

    Args:
        spec: how.
        log: file of its output.
    """

    def __init__(self, spec: Launch, log: Path) -> None:
        self.spec, self.log, self.url = spec, log, spec.url
        self.started = time.monotonic()
        guard = [sys.executable, "-m", "harness.serving.guard"]
        watched, self._held = os.pipe()
        with log.open("wb") as output:
            self._guard = subprocess.Popen(
                [*guard, str(watched), *spec.argv],
                cwd=ROOT,
                env=os.environ | dict(spec.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(watched,),
                start_new_session=True,
            )
        os.close(watched)

    def wait_ready(self) -> float:
        """Seconds from start until it says that it is well.

        Raises:
            NotReady: it ended first, or the deadline passed.
        """
        client, deadline = Client(self.url), self.started + self.spec.ready_s
        while not client.health():
            code = self._guard.poll()
            if code is not None:
                raise NotReady(
                    f"{self.spec.name} ended with {code} before it was ready{self._end()}"
                )
            if time.monotonic() > deadline:
                waited = f"not ready after {self.spec.ready_s:g} s"
                raise NotReady(f"{self.spec.name} at {self.url}: {waited}{self._end()}")
            time.sleep(POLL_S)
        return time.monotonic() - self.started

    @property
    def alive(self) -> bool:
        """Whether its first process runs."""
        return self._guard.poll() is None

    def stop(self) -> None:
        """Stop every process of it; once is enough, more does nothing.

        Raises:
            ContractError: something of it would not end.
        """
        if self._held >= 0:
            os.close(self._held)
            self._held = -1
        try:
            self._guard.wait(STOP_S)
        except subprocess.TimeoutExpired as error:
            raise ContractError(f"{self.spec.name} did not end within {STOP_S:g} s") from error

    def _end(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "".join(f"\n    {line}" for line in (f"log: {self.log}", *lines[-LAST_LINES:]))


@contextmanager
def launch(spec: Launch, log: Path) -> Iterator[Running]:
    """A server that is ready, stopped in the end.

    Raises:
        NotReady: it never was.
    """
    running = Running(spec, log)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


def free_port() -> int:
    """A port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def embedded(
    pair: str, *, python: str = sys.executable, ready_s: float = 60.0, **options: object
) -> Launch:
    """``specgate serve`` with a shipped pair.

    Args:
        pair: such as "gqa".
        python: the interpreter of an environment that has what specgate needs.
        ready_s: how long it may take.
        options: of the command, such as ``max_running_requests=8``; None leaves one out.
    """
    port = free_port()
    flags = {"pair": pair, "port": port} | {k: v for k, v in options.items() if v is not None}
    words = [
        w for name, value in flags.items() for w in (f"--{name.replace('_', '-')}", str(value))
    ]
    return Launch(
        name=f"embedded {pair}",
        argv=(python, "-m", "harness", "serve", *words),
        url=f"http://127.0.0.1:{port}",
        ready_s=ready_s,
    )
