"""Arms of a comparison: parsed from one word of a command line, started as servers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any

from harness.bench.server_pool import Server
from harness.bench.session_records import ArmFacts
from harness.core.argument_types import is_http_url
from harness.errors import ContractError, UsageError, rejected
from harness.server.launch import process
from harness.server.launch.sglang_command import DRAWN_WEIGHTS, sglang

EMBEDDED = (
    "spec",
    "num_steps",
    "num_draft_tokens",
    "max_running_requests",
    "context_length",
    "page_size",
    "num_pages",
    "kernel",
    "device",
)
SGLANG = (
    "num_steps",
    "num_draft_tokens",
    "max_running_requests",
    "context_length",
    "max_total_tokens",
    "accept_length",
    "tp_size",
)
SWITCHES = ("phases", "one_gpu")
COMMON = ("pair", "python", "slowdown", "name")
KINDS: dict[str, tuple[str, ...]] = {
    "embedded": (*COMMON, *EMBEDDED),
    "sglang": (*COMMON, "backend", "target", "draft", "shape", "args", *SWITCHES, *SGLANG),
}
MODELS = ("pair", "target", "shape")
"""Each says alone what an arm serves."""
NUMBERS = {*SGLANG, "page_size", "num_pages"}
FORMS = {
    "embedded:KEY=VALUE,…": "this project's engine, as specgate serve starts it",
    "sglang:KEY=VALUE,…": "an interpreter's sglang, with a shipped pair or a model",
    "url:http://HOST:PORT": "a server that runs",
}
MEANINGS = {
    "pair": "gqa (the default) or mla, a shipped target and draft",
    "python": "interpreter to run it, of an environment with another version",
    "slowdown": "share of every step's time to add; 0.05 is 5 %",
    "name": "in records and tables",
    "backend": "attention backend, such as triton (the default) or trtllm_mha",
    "target": "folder of a model, instead of a pair",
    "draft": "folder of its draft, or none",
    "shape": "widths of a real model, with weights that are drawn",
    "max_total_tokens": "size of the KV pool",
    "tp_size": "GPUs that share a server",
    "one_gpu": "on: they share one GPU instead; for numbers, not for speed",
    "accept_length": "simulated tokens of every verify; 3 for a shape",
    "args": "further flags of sglang.launch_server, separated by spaces",
    "phases": "on: the GPU's time is told apart by phases of a step",
}
"""Keys that are no options of ``specgate serve``."""
EXAMPLE = "--a sglang:pair=gqa --b sglang:pair=gqa,backend=flashinfer"
WIDTH = 78
DEFAULT_PAIR = "gqa"
OF_A_SHAPE = {
    "num_steps": 3,
    "num_draft_tokens": 4,
    "accept_length": 3,
    "context_length": 90_112,
    "max_total_tokens": 102_400,
}
"""Every round of a drawn draft is wrong, so what is accepted is fixed."""
SHAPE_ARGS = (
    *DRAWN_WEIGHTS,
    *("--page-size", "64"),  # which every backend takes
    "--disable-prefill-cuda-graph",  # which is compiled for minutes
    *(
        "--mem-fraction-static",
        "0.9",
    ),  # of what servers that start beside it leave; the pool is set
)
MOST_SLOWDOWN = 10.0
VERSION_SCRIPT = "import importlib.metadata as m, sys; print(*(m.version(p) for p in sys.argv[1:]))"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One arm.

    Args:
        spec: the word it was parsed from.
        kind: "embedded", "sglang" or "url".
        options: by name, as written.
        url: of an attached server.
        slowdown: share of a step's time that is added to every step; 0 for none.
        pairs: folders of the shipped pairs by name.
        shapes: folders of the shapes by name, laid out as a pair's.
    """

    spec: str
    kind: str
    options: Mapping[str, str]
    url: str = ""
    slowdown: float = 0.0
    pairs: Mapping[str, Path] = field(default_factory=dict)
    shapes: Mapping[str, Path] = field(default_factory=dict)

    @property
    def pair(self) -> str | None:
        """Name of the shipped pair that it serves, None where its model is unknown."""
        is_known = self.kind != "url" and not {"target", "shape"} & self.options.keys()
        return self._named_pair if is_known else None

    @property
    def python(self) -> str:
        """The interpreter that runs it, of another environment or this one."""
        return os.path.expanduser(self.options.get("python", sys.executable))

    @property
    def shape(self) -> str | None:
        """Name of the shape that it serves. Its rounds accept a fixed number of tokens."""
        return self.options.get("shape")

    @property
    def tells_phases(self) -> bool:
        """Whether its server is started with the phases of its steps timed."""
        return "phases" in self.options

    @property
    def _named_pair(self) -> str:
        return self.options.get("pair", DEFAULT_PAIR)

    @property
    def is_exact(self) -> bool:
        """Whether it computes in float32."""
        return self.kind == "embedded" and self.options.get("kernel", "reference") == "reference"

    @property
    def slows_itself(self) -> bool:
        """Whether the server is started slow; others are slowed by ``/slow_down``."""
        return self.kind == "embedded"

    @property
    def is_gpu_bound(self) -> bool:
        """Whether its step is the GPU's work; that of a shipped pair is the host's."""
        return self.kind == "sglang" and self.pair is None

    def slowed(self, slowdown: float) -> Arm:
        """The same arm with an injected slowdown, on top of its own."""
        both = self.slowdown + slowdown + self.slowdown * slowdown
        return replace(self, slowdown=both, spec=f"{self.spec} +{100 * slowdown:g}%")

    def start(self, log: Path) -> Server:
        """Start it, without waiting; a new port every time."""
        return process.ServerProcess(self._launch(), log)

    def facts(self) -> ArmFacts:
        """Its facts in a plan; the port differs at every start and is left out.

        Raises:
            ContractError: its interpreter lacks the package that it runs.
        """
        if self.kind == "url":
            return ArmFacts(name=self.spec, slowdown=self.slowdown)
        package = "torch" if self.kind == "embedded" else "sglang"
        versions = {package: _version(self.python, package)}
        words = self._launch().argv
        flags = [w for w, word in enumerate(words) if word[:2] == "--" and word.endswith("port")]
        ports = {place for flag in flags for place in (flag, flag + 1)}
        command = tuple(word for i, word in enumerate(words) if i not in ports)
        return ArmFacts(
            name=self.options.get("name", self.spec),
            command=command,
            versions=versions,
            slowdown=self.slowdown,
        )

    def _launch(self) -> process.ServerSpec:
        if self.kind == "url":
            return process.attached(self.url)
        if self.kind == "embedded":
            chosen: dict[str, Any] = {name: self.options.get(name) for name in EMBEDDED}
            chosen["slowdown"] = self.slowdown or None
            return process.embedded(self._named_pair, python=self.python, **chosen)
        folder = self.shapes[self.shape] if self.shape else self.pairs.get(self._named_pair)
        numbers = dict(OF_A_SHAPE) if self.shape else {}
        numbers |= {name: int(self.options[name]) for name in SGLANG if name in self.options}
        target = self.options.get("target") or (folder and folder / "target")
        draft = self.options.get("draft") or (folder and folder / "draft")
        if not target:
            raise UsageError(rejected("arm", self.spec, "target=FOLDER or pair=gqa, pair=mla"))
        return sglang(
            target=Path(target),
            draft=Path(draft) if draft and draft != "none" else None,
            attention_backend=self.options.get("backend", "triton"),
            gpu_delay=self.slowdown > 0 and self.is_gpu_bound,
            phases=self.tells_phases,
            is_on_one_gpu="one_gpu" in self.options,
            python=self.python,
            release=_version(self.python, "sglang") if "python" in self.options else None,
            args=[*(SHAPE_ARGS if self.shape else ()), *self.options.get("args", "").split()],
            **numbers,
        )


def parse(
    spec: str,
    pairs: Mapping[str, Path] | None = None,
    shapes: Mapping[str, Path] | None = None,
) -> Arm:
    """An arm from ``embedded:pair=gqa,…``, ``sglang:backend=triton,…`` or ``url:http://…``.

    Raises:
        UsageError: naming the word and what is accepted.
    """
    kind, _, rest = spec.partition(":")
    if kind == "url" and is_http_url(rest):
        return Arm(spec=spec, kind=kind, options={}, url=rest.rstrip("/"))
    if kind not in KINDS:
        accepted = "embedded:KEY=VALUE,… or sglang:KEY=VALUE,… or url:http://…"
        raise UsageError(rejected("arm", spec, accepted))
    options = _options(kind, rest)
    arm = Arm(
        spec=spec,
        kind=kind,
        options=options,
        slowdown=_slowdown(options.get("slowdown", "0")),
        pairs=pairs or {},
        shapes=shapes or {},
    )
    if arm.pairs and arm.pair and arm.pair not in arm.pairs:
        raise UsageError(rejected(f"pair of {kind}", arm.pair, ", ".join(arm.pairs)))
    if arm.shape and arm.shape not in arm.shapes:
        raise UsageError(rejected(f"shape of {kind}", arm.shape, ", ".join(arm.shapes)))
    if len(models := [name for name in MODELS if name in options]) > 1:
        raise UsageError(rejected(f"model of {kind}", ", ".join(models), "one of them"))
    return arm


def grammar() -> str:
    """The grammar of an arm for ``--help``: its forms, its keys, an example; indented lines."""
    keys = [f"  {name:<17}{meaning}" for name, meaning in MEANINGS.items()]
    options = [
        fill(f"{kind}: {', '.join(known)}", WIDTH, initial_indent="  ", subsequent_indent="    ")
        for kind, known in KINDS.items()
    ]
    return "\n\n".join(
        [
            "SPEC, which stands for an arm, is one of",
            "\n".join(f"  {form:<22}{meaning}" for form, meaning in FORMS.items()),
            "KEY is one of",
            "\n".join(options),
            "The options of specgate serve mean what they mean there; besides,",
            "\n".join(keys),
            "for example",
            f"  {EXAMPLE}",
        ]
    )


def _options(kind: str, words: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for word in filter(None, words.split(",")):
        name, equals, value = word.partition("=")
        if not equals or name not in KINDS[kind] or name in options:
            accepted = f"{', '.join(KINDS[kind])}, each once as KEY=VALUE"
            raise UsageError(rejected(f"option of {kind}", word, accepted))
        if name in NUMBERS and (not value.isdecimal() or not int(value)):
            raise UsageError(rejected(f"option of {kind}", word, "1 or more"))
        if name in SWITCHES and value != "on":
            raise UsageError(rejected(f"option of {kind}", word, f"{name}=on, or without it"))
        options[name] = value
    if "one_gpu" in options and int(options.get("tp_size", 1)) < 2:
        raise UsageError(rejected(f"option of {kind}", "one_gpu=on", "with tp_size=2 or more"))
    return options


def _slowdown(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= MOST_SLOWDOWN:
        accepted = f"a number from 0 to {MOST_SLOWDOWN:g}, 0.05 is 5 %"
        raise UsageError(rejected("slowdown", text, accepted))
    return value


@cache
def _version(python: str, package: str) -> str:
    asked = [python, "-c", VERSION_SCRIPT, package]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ContractError(f"{python} does not know the version of {package}: {error}") from error
    return done.stdout.strip()
