"""A pytest that has collected once and runs the tests it is asked for; on a node, beside Ray."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ci.cluster.work import UnitEnd
from harness.core.signals import ending
from harness.errors import UsageError

COLLECT_S = 600.0
CHUNK = 1 << 16
LOOK_S = 1.0


class PytestProcess:
    """One process, in a group of its own.

    Args:
        command: that runs pytest, without the pipes' options.
        folder: it runs in.
        environment: its variables.

    Attributes:
        collected: node ids in their order.

    Raises:
        UsageError: it collected nothing; the message is its last line.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        questions, self._questions = os.pipe()
        self._answers, answers = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 closed by close()
        self._unread, self._is_over = b"", False
        self._process = subprocess.Popen(
            [*command, "--questions", str(questions), "--answers", str(answers)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=(questions, answers),
            start_new_session=True,
        )
        os.close(questions)
        os.close(answers)
        said = next(self._lines(COLLECT_S), None)
        if said is None:
            reason = self.end()
            self.close()
            raise UsageError(reason)
        self.collected: tuple[str, ...] = tuple(said["collected"])

    def run(self, tests: Sequence[str], limit_s: float) -> Run:
        """Run tests one after another.

        Args:
            tests: node ids that it has collected.
            limit_s: of each; one that takes longer ends the process.
        """
        os.write(self._questions, json.dumps([*tests]).encode() + b"\n")
        made = Run(tests)
        for said in self._lines(limit_s):
            if "over" in said:
                return made
            made.take(said)
        made.ends_by(self.end() if self._is_over else f"over {limit_s:g} s")
        self.close()
        return made

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None and not self._log.closed

    def end(self) -> str:
        """How the process ended, and what it said last."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        code = self._process.poll()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        if code is not None and code < 0:
            return f"its process ended by {ending(code)}"
        said = next((line for line in reversed(lines) if line.strip()), "")
        return f"its process ended with {code}: {said}"

    def close(self) -> None:
        """End it and whatever it started."""
        if self._log.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for descriptor in (self._questions, self._answers):
            os.close(descriptor)
        self._log.close()

    def _lines(self, limit_s: float) -> Iterator[dict[str, Any]]:
        """Answers as they come, until the process ends or says nothing for so long."""
        while True:
            *whole, self._unread = self._unread.split(b"\n")
            for place, line in enumerate(whole):
                # What is not asked for any more stays unread.
                said = json.loads(line)
                rest = whole[place + 1 :]
                if "over" in said or "collected" in said:
                    self._unread = b"\n".join([*rest, self._unread])
                yield said
            if not self._more(limit_s):
                return

    def _more(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            # What it forked may hold the pipe open longer than it lives.
            was_alive = self._process.poll() is None
            if select.select([self._answers], [], [], LOOK_S)[0]:
                chunk = os.read(self._answers, CHUNK)
                self._unread, self._is_over = self._unread + chunk, not chunk
                return bool(chunk)
            if not was_alive:
                self._is_over = True
                return False
        return False


class Run:
    """What is known of a batch while it runs.

    Args:
        tests: of the batch.
    """

    def __init__(self, tests: Sequence[str]) -> None:
        self._left = [*tests]
        self._now = ""
        self.ended: list[UnitEnd] = []
        self.killer = self.reason = self.blank = ""
        self.began = 0.0

    @property
    def left(self) -> tuple[str, ...]:
        """Tests that have not begun."""
        return tuple(self._left)

    def take(self, said: Mapping[str, Any]) -> None:
        """Take in an answer."""
        if "began" in said:
            self._now, self.blank = said["began"], ""
            self._left.remove(self._now)
            self.began = self.began or said["at"]
        elif "blank" in said:
            self.blank = said["blank"]
        elif "lost" in said:
            self.reason = said["reason"]
        elif "ended" in said:
            facts = {name: said[name] for name in ("outcome", "message", "seconds", "record")}
            self.ended.append(UnitEnd(unit=said["ended"], **facts))
            self._now = self.blank = ""

    def ends_by(self, reason: str) -> None:
        """The process is gone; the test that was running ended it, or the first that would have."""
        self.reason = self.reason or reason
        self.killer = self._now or next(iter(self._left), "")
        if self.killer in self._left:
            self._left.remove(self.killer)
