"""Bad input ends with 2 and one line that names it and what is accepted, before anything is loaded.

In this process: an exception that nobody caught would fail the test.
"""

from __future__ import annotations

import shlex
import socket
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ci import gate, report
from fixtures import bench, resolution
from fixtures.fakes.sample_records import trial
from harness import __main__ as cli
from harness.bench import __main__ as compare
from harness.core.argument_types import above_zero, check_writable, port
from harness.kernels.limits import __main__ as limits
from harness.server import __main__ as serve

MAINS: dict[str, Callable[[Sequence[str]], int]] = {
    "specgate": cli.main,
    "specgate serve": serve.main,
    "specgate bench": bench.main,
    "specgate compare": compare.main,
    "specgate resolution": resolution.main,
    "specgate limits": limits.main,
    "specgate report": report.main,
    "python -m ci.gate": gate.main,
}
ARMS = "--a embedded: --b embedded:"
ROWS = [
    ("specgate", "", "the following arguments are required: VERB"),
    ("specgate", "frobnicate", "argument VERB: invalid choice: 'frobnicate'"),
    ("specgate report", "a.jsonl --fast", "unrecognized arguments: --fast"),
    ("specgate", "gpu --workers-per-gpu 0", "'0' is not accepted; accepted: 1 or more"),
    ("specgate serve", "", "the following arguments are required: --pair"),
    (
        "specgate serve",
        "--pair gqa --port 70000",
        "--port: '70000' is not accepted; accepted: 0 to",
    ),
    (
        "specgate serve",
        "--pair gqa --port -1",
        "--port: '-1' is not accepted; accepted: 0 to 65535",
    ),
    ("specgate serve", "--pair gqa --port abc", "--port: 'abc' is not accepted; accepted: 0 to"),
    (
        "specgate serve",
        "--pair gqa --port {taken}",
        "--port = {taken} is not accepted; accepted: a",
    ),
    (
        "specgate serve",
        "--pair gqa --host 8.8.8.8",
        "--host = '8.8.8.8' is not accepted; accepted:",
    ),
    ("specgate serve", "--pair gqa --context-length 4097", "accepted: at most 4096, the positions"),
    ("specgate serve", "--pair gqa --models {tmp}/none", "--models = '{tmp}/none' is not accepted"),
    ("specgate serve", "--pair llama", "--pair = 'llama' is not accepted; accepted: gqa, mla"),
    ("specgate bench", "", "the following arguments are required: --a"),
    ("specgate bench", "--a embedded:", "b = None is not accepted; accepted: a SPEC"),
    ("specgate bench", "--a vllm --b vllm", "arm = 'vllm' is not accepted; accepted: embedded:KEY"),
    ("specgate bench", "--a url:foo --b url:foo", "arm = 'url:foo' is not accepted"),
    ("specgate bench", "--a url:http:// --b embedded:", "arm = 'url:http://' is not accepted"),
    ("specgate bench", "--a url:http://[ --b embedded:", "arm = 'url:http://[' is not accepted"),
    (
        "specgate bench",
        "--a url:http://h:a --b embedded:",
        "arm = 'url:http://h:a' is not accepted",
    ),
    ("specgate bench", f"{ARMS} --out {{tmp}}", "a file that can be written (Is a directory)"),
    ("specgate bench", f"{ARMS} --out {{tmp}} --resume", "can be written (Is a directory)"),
    ("specgate bench", f"{ARMS} --out {{junk}}/b.jsonl", "a folder that can be made (File exists)"),
    ("specgate bench", f"{ARMS} --out {{junk}}", "accepted: a file that is not packed"),
    ("specgate bench", f"{ARMS} --out {{bench}}", "accepted: a new file, or --resume"),
    (
        "specgate bench",
        f"{ARMS} --calibration {{junk}}",
        "accepted: a whole .gz file of JSON lines",
    ),
    ("specgate compare", "{tmp}/none", "bench records = '{tmp}/none' is not accepted"),
    (
        "specgate compare",
        "{junk}",
        "bench records = '{junk}' is not accepted; accepted: a whole .gz",
    ),
    ("specgate compare", "{bytes}", "bench records = '{bytes}' is not accepted; accepted: JSON"),
    ("specgate compare", "{bench}", "{bench}:1: kind = "),
    ("specgate limits", "", "--device = 'cuda' is not accepted; accepted: cpu; 0 CUDA devices"),
    ("specgate limits", "--device tpu", "--device = 'tpu' is not accepted; accepted: cpu, cuda"),
    ("specgate limits", "--device cpu --out {tmp}/a/b.md", "that can be written (No such file"),
    ("specgate report", "{tmp}/none", "records = '{tmp}/none' is not accepted; accepted: an exist"),
    ("specgate report", "{junk}", "records = '{junk}' is not accepted; accepted: JSON lines"),
    ("specgate resolution", "", "the following arguments are required: [HOST=]RECORDS"),
    ("specgate resolution", "{tmp}/none", "bench records = '{tmp}/none' is not accepted"),
    ("specgate resolution", "{bench}", "{bench}:1: kind = "),
    ("specgate resolution", "=b.jsonl", "records = '=b.jsonl' is not accepted; accepted: HOST="),
    ("specgate resolution", "b --effects 0,2", "'0,2' is not accepted; accepted: numbers between"),
    ("specgate report", "{bench}", "{bench}:1: record format = 2 is not accepted; accepted: 1"),
    ("specgate report", "{empty}", "records = '{empty}' is not accepted; accepted: one or more"),
    ("specgate report", "{one} --out {tmp}/a/b.html", "--out = '{tmp}/a/b.html' is not accepted"),
    ("python -m ci.gate", "{junk}", "records = '{junk}' is not accepted; accepted: JSON lines"),
]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Files and a port that bad input names."""
    folder = tmp_path / "folder"
    folder.mkdir()
    contents = {
        "junk": ("records.jsonl.gz", b"\x8b\xff\xfe no gzip"),
        "bytes": ("bytes.jsonl", b"\x8b\xff\xfe no text"),
        "bench": ("bench.jsonl", b'{"format": 2}\n'),
        "empty": ("empty.jsonl", b""),
        "one": ("one.jsonl", trial("one").to_json().encode() + b"\n"),
    }
    found = {"tmp": str(folder)}
    for name, (file, data) in contents.items():
        (tmp_path / file).write_bytes(data)
        found[name] = str(tmp_path / file)
    monkeypatch.setattr(bench, "raise_priority", lambda: None)  # would outlive the test
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield found | {"taken": str(taken.getsockname()[1])}


def ended(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> object:
    try:
        return main(argv)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(
    ("program", "words", "told"), ROWS, ids=[f"{program} {words}" for program, words, _ in ROWS]
)
def test_bad_input_is_told_in_one_line(
    places: dict[str, str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    words: str,
    told: str,
) -> None:
    monkeypatch.setattr(bench, "busy", lambda: pytest.fail("it watches the machine before"))
    before = sorted(Path(places["tmp"]).parent.rglob("*"))
    assert ended(MAINS[program], shlex.split(words.format(**places))) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert told.format(**places) in line
    assert sorted(Path(places["tmp"]).parent.rglob("*")) == before


def test_what_is_there_already_is_still_there_after_the_question_whether_it_can_be_written(
    tmp_path: Path,
) -> None:
    empty, device, new = (tmp_path / name for name in ("empty", "device", "new"))
    empty.touch()
    device.symlink_to("/dev/null")
    for path in (empty, device, new):
        check_writable(path, "--out")
    said = "an empty file and what is no file stay, and no new file is left"
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["device", "empty"], f"{said}: {left}"


@pytest.mark.parametrize(
    ("read", "text", "accepted"),
    [
        (port, "0", True),
        (port, "65535", True),
        (port, "65536", False),
        (above_zero, "1e-9", True),
        (above_zero, "inf", True),
        (above_zero, "0", False),
        (above_zero, "nan", False),
    ],
)
def test_a_number_at_its_bound(read: Callable[[str], float], text: str, accepted: bool) -> None:
    try:
        read(text)
        is_accepted = True
    except ArgumentTypeError:
        is_accepted = False
    said = f"{read.__name__} {'accepts' if accepted else 'refuses'} {text}"
    assert is_accepted is accepted, said
