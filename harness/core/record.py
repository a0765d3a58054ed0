"""The record of a trial: one JSON line, the only input of gates and reports."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness.errors import UsageError, rejected

RECORD_FORMAT = 1


class Verdict(StrEnum):
    """Outcome of a trial."""

    PASSED = "passed"
    WRONG_SHAPE = "wrong_shape"
    WRONG_DTYPE = "wrong_dtype"
    NON_FINITE = "non_finite"
    WRONG_NUMBERS = "wrong_numbers"
    WRONG_TOKENS = "wrong_tokens"
    BROKEN_INVARIANT = "broken_invariant"
    OVER_BUDGET = "over_budget"
    WRONG_GOLDEN = "wrong_golden"
    ERROR = "error"
    REFUSED = "refused"
    WAIVED = "waived"

    @property
    def is_red(self) -> bool:
        """Whether a gate must fail on it."""
        return self not in (Verdict.PASSED, Verdict.REFUSED, Verdict.WAIVED)


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One compared quantity of a trial.

    Args:
        name: "hidden_states", "logits", "kv_cache", …
        error: worst relative L2 error of a row against the oracle.
        allowed: for that row.
        where: request, position, page of the first bad row, or of the worst one if none is bad.
    """

    name: str
    error: float
    allowed: float
    where: str = ""

    @property
    def ratio(self) -> float:
        """Error / allowed, above 1 is red; infinite where either is not a number."""
        if self.error == 0:
            return 0.0
        ratio = self.error / self.allowed if self.allowed else math.inf
        return math.inf if math.isnan(ratio) else ratio


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Tokens of generated texts by what the oracle said of them.

    Args:
        judged: those that were compared with its choice behind the tokens before them.
        tied: of these, that were not its choice and tied with it.
        unjudged: the others.
    """

    judged: int = 0
    tied: int = 0
    unjudged: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        """The sums."""
        return TokenCounts(
            judged=self.judged + other.judged,
            tied=self.tied + other.tied,
            unjudged=self.unjudged + other.unjudged,
        )

    def __str__(self) -> str:
        """Such as "24 judged, 2 tied, 0 unjudged"."""
        return f"{self.judged} judged, {self.tied} tied, {self.unjudged} unjudged"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The machine a trial ran on; unknown facts are empty strings.

    Args:
        device: name of the GPU, such as "NVIDIA H200"; "cpu" without one.
        compute_capability: of that GPU, such as "9.0".
        tree: digest of the sources, as ``harness.core.tree`` takes it; the same without git.
    """

    python: str
    torch: str
    platform: str
    processor: str
    device: str
    cuda: str = ""
    driver: str = ""
    triton: str = ""
    sglang: str = ""
    sgl_kernel: str = ""
    flashinfer: str = ""
    commit: str = ""
    dirty: bool = False
    compute_capability: str = ""
    tree: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One trial.

    Args:
        case: id of the row (or name of the model pair and prompt).
        subject: backend and kernel, such as "trtllm_mha/xqa".
        family, mode, execution: the values of the enums of ``harness.core.case``.
        device: "cpu", "cuda:0", …; its index is no part of what the trial is.
        verdict: its outcome.
        message: one line of cause; the reason where refused or waived.
        quantities: compared ones.
        axes: its values on the axes of ``fixtures/tables/axes.py``, for a case; none elsewhere.
        effects: exact counts, such as {"host_syncs": 0, "kernels": 2}.
        accept_lengths: accepted tokens of every verify step, where the trial generated text.
        tokens: of that text; none elsewhere.
        seconds: wall time.
        environment: the machine.
        reproduce: the command that runs this trial alone.
        test: node id of the test that left it; empty where none did.
        planned: trials of its run, itself included; 0 where they were not counted.
        kind: whose plan it belongs to, "cpu" or a compute capability such as "sm90"; empty in
            records older than that. A run on a GPU counts effects on the CPU: those are its own.
        recorded: time, ISO 8601, UTC; empty where it was not taken.
    """

    case: str
    subject: str
    family: str
    mode: str
    execution: str
    device: str
    verdict: Verdict
    message: str = ""
    quantities: tuple[Quantity, ...] = ()
    axes: dict[str, str | int] = field(default_factory=dict)
    effects: dict[str, int] = field(default_factory=dict)
    accept_lengths: tuple[int, ...] = ()
    tokens: TokenCounts = field(default_factory=TokenCounts)
    seconds: float = 0.0
    environment: Environment
    reproduce: str = ""
    test: str = ""
    planned: int = 0
    kind: str = ""
    recorded: str = ""

    @property
    def place(self) -> str:
        """What the trial is about: "sm90", "cpu", or "cpu for sm90" of that plan's CPU part."""
        on = self.device.partition(":")[0]
        if self.kind in ("", on):
            return on
        return self.kind if on == "cuda" else f"{on} for {self.kind}"

    @property
    def trial(self) -> tuple[str, str, str, str, str]:
        """What no two trials of a verdict share; which of several equal GPUs ran it is no part."""
        return (self.case, self.subject, self.mode, self.execution, self.place)

    @property
    def worst(self) -> float:
        """Largest error / allowed over the quantities, 0 where none was compared."""
        return max((quantity.ratio for quantity in self.quantities), default=0.0)

    def to_json(self) -> str:
        """One line, without a newline."""
        return json.dumps(
            {"format": RECORD_FORMAT} | asdict(self), separators=(",", ":"), allow_nan=True
        )

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The inverse of ``to_json``.

        Raises:
            UsageError: the line is not a record of this format.
        """
        try:
            data: dict[str, Any] = json.loads(line)
            if (found := data.pop("format", None)) != RECORD_FORMAT:
                raise UsageError(
                    f"record format = {found!r} is not accepted; accepted: {RECORD_FORMAT}"
                )
            data["verdict"] = Verdict(data["verdict"])
            data["quantities"] = tuple(Quantity(**q) for q in data["quantities"])
            data["accept_lengths"] = tuple(data["accept_lengths"])
            data["tokens"] = TokenCounts(**data.get("tokens", {}))
            data["environment"] = Environment(**data["environment"])
            return cls(**data)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"not a record: {line[:80]!r} ({error})") from error


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Append one line per record; each line is written whole."""
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(record.to_json() + "\n")


def record_lines(records: Iterable[Record]) -> str:
    """The text of a file of records: one line each."""
    return "".join(record.to_json() + "\n" for record in records)


def read_records(path: Path) -> Iterator[Record]:
    """Every record of a file, in order.

    Raises:
        UsageError: the file is missing or no text, or a line is not a record; the message names
            the line.
    """
    if not path.is_file():
        raise UsageError(rejected("records", str(path), "an existing file"))
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(rejected("records", str(path), "JSON lines in UTF-8")) from error
    for number, line in enumerate(lines, start=1):
        try:
            yield Record.from_json(line)
        except UsageError as error:
            raise UsageError(f"{path}:{number}: {error}") from error
