"""Server processes: started, waited for and stopped, however this process ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from harness.core.paths import ROOT
from harness.errors import ContractError, NotReady, ServerError
from harness.server.client.sglang import Client
from harness.server.launch import guard
from harness.server.launch.ports import free_port

POLL_S = 0.1
STOP_S = 30.0
GRACE_S = 5.0
ATTACH_S = 10.0
"""Until a server that runs must answer."""
LAST_LINES = 20


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """Command and address of one server process.

    Args:
        name: for people.
        argv: its command; empty for a server that runs already.
        url: that it will listen on.
        env: added to this process's environment.
        ready_s: seconds until it must be healthy.
        grace_s: seconds between SIGTERM and SIGKILL.
    """

    name: str
    argv: tuple[str, ...]
    url: str
    env: Mapping[str, str] = field(default_factory=dict)
    ready_s: float = 180.0
    grace_s: float = GRACE_S


class ServerProcess:
    """A server that was started and may not be ready yet; several can start in parallel.

    Args:
        spec: its command and address.
        log: file of its output, overwritten.

    Attributes:
        patience_s: seconds from its start until it must be healthy; may be lowered meanwhile.
    """

    def __init__(self, spec: ServerSpec, log: Path) -> None:
        self.spec, self.log, self.url = spec, log, spec.url
        self.started, self.patience_s = time.monotonic(), spec.ready_s
        self._ready_s: float | None = None
        self._guard = _guarded(spec, log) if spec.argv else None

    @property
    def pid(self) -> int | None:
        """The parent of the server's processes; None for an attached server."""
        return self._guard.pid if self._guard else None

    @property
    def alive(self) -> bool:
        """Whether its first process runs; of an attached server, whether it is healthy."""
        return self._guard.poll() is None if self._guard else Client(self.url).health()

    def wait_ready(self) -> float:
        """Seconds from the start until it was healthy; later calls only need an answer.

        sglang's health check generates a token within a second, which a busy server cannot do.

        Raises:
            NotReady: it ended, the deadline has passed, or it was ready and gives no answer.
        """
        client, called = Client(self.url), time.monotonic()
        while not (client.health() if self._ready_s is None else client.answers()):
            if self._guard and (code := self._guard.poll()) is not None:
                when = "before" if self._ready_s is None else "after"
                raise NotReady(f"{self._who} ended with {code} {when} it was ready{self._end()}")
            if late := self._late(called):
                raise NotReady(f"{self._who} {late}{self._end()}")
            time.sleep(POLL_S)
        if self._ready_s is None:
            self._ready_s = time.monotonic() - self.started
        return self._ready_s

    def _late(self, called: float) -> str:
        """What it has not done in time, empty while there is time left."""
        now = time.monotonic()
        if self._ready_s is not None:
            late = f"gave no answer for {ATTACH_S:.4g} s after it was ready"
            return late if now > called + ATTACH_S else ""
        late = f"not ready after {self.patience_s:.4g} s"
        return late if now > self.started + self.patience_s else ""

    def stop(self) -> None:
        """Stop every process of it; a second call does nothing.

        Raises:
            ServerError: a process did not end.
        """
        if self._guard is None:
            return
        assert self._guard.stdin
        self._guard.stdin.close()
        try:
            self._guard.wait(STOP_S)
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"{self._who} did not end within {STOP_S:g} s") from error

    @property
    def _who(self) -> str:
        return f"{self.spec.name} at {self.url}"

    def _end(self) -> str:
        if self._guard is None:
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "".join(f"\n    {line}" for line in (f"log: {self.log}", *lines[-LAST_LINES:]))


def _guarded(spec: ServerSpec, log: Path) -> subprocess.Popen[bytes]:
    """Start the server under a guard that ends its processes when standard input closes."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(
            guard.command(spec.grace_s, spec.argv),
            cwd=ROOT,
            env=os.environ | dict(spec.env),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_guarded(
    argv: Sequence[str],
    *,
    cwd: Path | None = None,
    log: Path | None = None,
    patience_s: float | None = None,
) -> int:
    """Run a command, which ends with this process however that ends.

    Args:
        argv: its words.
        cwd: folder it runs in, None for this process's.
        log: file of its output, overwritten; None for this process's output.
        patience_s: seconds until it must have ended, None for no limit.

    Returns:
        Its exit code, 127 where it could not be started.

    Raises:
        ContractError: it was ended, because it took too long.
    """
    with (
        log.open("wb") if log else nullcontext() as output,
        subprocess.Popen(
            guard.command(GRACE_S, argv),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            start_new_session=True,
        ) as running,
    ):
        try:
            return running.wait(patience_s)
        except subprocess.TimeoutExpired as error:
            raise ContractError(f"{argv[0]} did not end within {patience_s:g} s") from error


@contextmanager
def launch(spec: ServerSpec, log: Path) -> Iterator[ServerProcess]:
    """A ready server, stopped on exit.

    Raises:
        NotReady: it ended, or the deadline has passed.
    """
    running = ServerProcess(spec, log)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


def attached(url: str) -> ServerSpec:
    """A server that runs already and is not stopped."""
    return ServerSpec(name="attached", argv=(), url=url.rstrip("/"), ready_s=ATTACH_S)


def embedded(
    pair: str, *, python: str = sys.executable, ready_s: float = 120.0, **options: object
) -> ServerSpec:
    """``specgate serve`` with a shipped pair.

    Args:
        pair: such as "gqa".
        python: an interpreter with specgate's requirements.
        ready_s: seconds until it must be healthy.
        options: of the command, such as ``max_running_requests=8``; None leaves one out.
    """
    port = free_port()
    given = {name: value for name, value in options.items() if value is not None}
    return ServerSpec(
        name=f"embedded {pair}",
        argv=(python, "-m", "harness", "serve", *flags(pair=pair, port=port, **given)),
        url=f"http://127.0.0.1:{port}",
        ready_s=ready_s,
    )


def flags(**values: object) -> tuple[str, ...]:
    """``--name value`` of each, in order, with dashes for underscores."""
    pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in values.items())
    return tuple(word for pair in pairs for word in pair)
