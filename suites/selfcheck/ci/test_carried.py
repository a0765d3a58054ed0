"""Records that were carried here join the verdict, if nobody changed them and the tree is this."""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ci import carried, gate, report
from ci.offline import __main__ as offline
from ci.offline import run
from fixtures.fakes.sample_records import ENVIRONMENT, compared, trial
from harness.core.record import Record, Verdict, write_records
from harness.core.tree import digest
from harness.errors import UsageError

HERE = replace(ENVIRONMENT, tree=digest(), compute_capability="10.0", device="NVIDIA B200")
FACTS = {"kind": "sm100", "device": "cuda:2", "environment": HERE, "planned": 2, "test": "a"}


def record(case: str, **facts: object) -> Record:
    return trial(case, **FACTS | facts)


RECORDS = [record("one"), record("two", verdict=Verdict.REFUSED, message="head_dim")]


def packed(folder: Path, records: list[Record] = RECORDS, kind: str = "sm100") -> Path:
    path = folder / "records.jsonl"
    path.unlink(missing_ok=True)
    write_records(path, records)
    return carried.pack(path, kind, folder / "sm100.xz")


def test_what_is_carried_comes_out_as_it_went_in(tmp_path: Path) -> None:
    assert carried.unpack(packed(tmp_path)) == RECORDS


def test_it_joins_the_verdict_of_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = tmp_path / "rest.jsonl"
    sm90 = replace(HERE, compute_capability="9.0", device="NVIDIA H200")
    write_records(rest, [trial("one", kind="sm90", device="cuda:0", environment=sm90)])
    words = [str(rest), str(packed(tmp_path)), "--kinds", "sm90,sm100"]
    assert gate.main(words) == 0
    assert "planned 3 = run 2 + refused 1 + waived 0" in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert report.main([*words[:2], "--out", str(page)]) == 0
    assert "NVIDIA B200" in page.read_text()


@pytest.mark.parametrize("said", ["passed, refused", "a, b"])
def test_files_that_contradict_each_other_are_red(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str
) -> None:
    facts = {"verdict": Verdict.PASSED} if "passed" in said else {"test": "b"}
    other = [RECORDS[0], replace(RECORDS[1], **{"message": "head_dim"} | facts)]
    (tmp_path / "other").mkdir()
    assert gate.main([str(packed(tmp_path)), str(packed(tmp_path / "other", other))]) == 1
    out = capsys.readouterr().out
    assert "records of one trial contradict each other: two trtllm_mha/reference" in out
    assert said in out


def again(head: dict[str, object], body: str) -> bytes:
    return lzma.compress((json.dumps(head) + "\n" + body).encode())


def change_a_record(path: Path) -> None:
    first, _, body = lzma.decompress(path.read_bytes()).decode().partition("\n")
    path.write_bytes(again(json.loads(first), body.replace('"refused"', '"passed"')))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def say_another_kind(path: Path) -> None:
    first, _, body = lzma.decompress(path.read_bytes()).decode().partition("\n")
    path.write_bytes(again(json.loads(first) | {"kind": "sm103"}, body))


def say_another_tree(path: Path) -> None:
    first, _, body = lzma.decompress(path.read_bytes()).decode().partition("\n")
    path.write_bytes(again(json.loads(first) | {"tree": "0" * 64}, body))


def write_another_format(path: Path) -> None:
    first, _, body = lzma.decompress(path.read_bytes()).decode().partition("\n")
    body = body.replace('"format":', '"format":9')
    sha256 = hashlib.sha256(body.encode()).hexdigest()
    path.write_bytes(again(json.loads(first) | {"sha256": sha256}, body))


def put_something_else(path: Path) -> None:
    path.write_bytes(lzma.compress(b"[]\n"))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (change_a_record, "sha256 = "),
        (cut, "a file that carries records"),
        (say_another_kind, "kind = 'sm100' is not accepted; accepted: sm103"),
        (say_another_tree, "accepted: 000000000000"),
        (write_another_format, "sm100.xz: record format = 91 is"),
        (put_something_else, "carried records of format 1"),
    ],
)
def test_a_file_that_was_changed_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    harm: Callable[[Path], None],
    told: str,
) -> None:
    path = packed(tmp_path)
    harm(path)
    assert gate.main([str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("gate: ")
    assert told in line


def test_records_of_another_tree_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(HERE, tree="f" * 64)
    path = packed(tmp_path, [replace(one, environment=other) for one in RECORDS])
    assert gate.main([str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"tree = 'ffffffffffff' is not accepted; accepted: {digest()[:12]}")


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([], "accepted: one or more records"),
        ([RECORDS[0], record("two", kind="sm90")], "kind = 'sm100, sm90' is not accepted"),
        (
            [RECORDS[0], record("two", environment=replace(HERE, tree="f" * 64))],
            "ffffffffffff' is not accepted",
        ),
    ],
)
def test_what_is_not_one_run_of_the_kind_is_not_packed(
    tmp_path: Path, records: list[Record], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        packed(tmp_path, records)


def test_a_whole_plan_fits_into_the_file(tmp_path: Path) -> None:
    # As many as an H200's, each with numbers and words of its own.
    draw = [record(f"mha-target_verify-edge{n}-{n * 7919 % 997}", seconds=n * 0.00137,
                   quantities=tuple(q for name in ("hidden_states", "logits", "kv_cache.key0")
                                    for q in compared(n * 1e-7 + len(name) * 1e-4, 0.5, name)),
                   reproduce=f"pytest 'suites/differential/test_cases.py::test_case[{n}]'",
                   test=f"suites/differential/test_cases.py::test_case[{n}]")
            for n in range(3300)]  # fmt: skip
    assert packed(tmp_path, draw).stat().st_size <= carried.MOST_BYTES


NEEDS_KEYGEN = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="OpenSSH is not here")


def key(folder: Path, name: str) -> Path:
    path = folder / name
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path)]
    subprocess.run(words, check=True)
    return path


@NEEDS_KEYGEN
def test_a_signature_tells_who_vouches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, other, path = key(tmp_path, "own"), key(tmp_path, "other"), packed(tmp_path)
    signers = tmp_path / "signers"
    signers.write_text(f"lab@example.org {own.with_suffix('.pub').read_text()}")
    words = [str(path), "--signers", str(signers)]
    assert gate.main(words) == 2
    assert "accepted: a signature beside each file" in capsys.readouterr().err
    assert carried.sign(path, own).name == "sm100.xz.sig"
    assert gate.main(words) == 0
    assert f"gate: {path} is signed by lab@example.org\n" in capsys.readouterr().out
    signers.write_text(f"lab@example.org,attic@example.org {own.with_suffix('.pub').read_text()}")
    assert gate.main(words) == 0, "a key that is listed under two names is one of the signers'"
    assert f"gate: {path} is signed by lab@example.org\n" in capsys.readouterr().out
    packed(tmp_path, [*RECORDS, record("three")])
    assert gate.main(words) == 2
    assert "signature = 'lab@example.org' is not accepted" in capsys.readouterr().err
    path.with_name("sm100.xz.sig").unlink()
    carried.sign(path, other)
    assert gate.main(words) == 2
    assert "signer = 'unknown' is not accepted" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"--sign = .* is not accepted"):
        carried.sign(path, tmp_path / "no key")


@NEEDS_KEYGEN
@pytest.mark.parametrize("signs", [False, True])
def test_records_that_are_too_large_are_told_signed_or_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    signs: bool,
) -> None:
    own, path = key(tmp_path, "own") if signs else None, packed(tmp_path)
    size = path.stat().st_size
    carry = run.Carry(kind="sm100", key=own)
    monkeypatch.setattr(run, "MOST_BYTES", size)
    carry.write(tmp_path)
    assert capsys.readouterr().err == "", "as large as may be carried is not too large"
    monkeypatch.setattr(run, "MOST_BYTES", size - 1)
    carry.write(tmp_path)
    told = f"offline: {path} is larger than {size - 1:,} bytes\n"
    assert capsys.readouterr().err == told, "it is the file of records that must not be too large"


@pytest.mark.parametrize("code", [0, 1])
def test_a_rehearsal_leaves_the_file_of_the_declared_kind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
) -> None:
    started: list[list[str]] = []

    def lane(words: list[str], _: Mapping[str, str]) -> int:
        started.append(words)
        write_records(tmp_path / "report" / "records.jsonl", RECORDS)
        return code

    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "records.jsonl").write_text("of a run before\n")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "command", lambda name, args: [name, *args])
    monkeypatch.setattr(run, "carried_out", lane)
    assert offline.main(["rehearse", "--kind", "sm100", "--lane", "gpu", "-k", "xqa"]) == code
    assert started == [["gpu", "--kind", "sm100", "--device", "cpu", "-k", "xqa"]]
    assert carried.unpack(tmp_path / "report" / "sm100.xz") == RECORDS
    assert capsys.readouterr().out.startswith(f"offline: {tmp_path}/report/sm100.xz (")


def test_a_lane_that_leaves_no_records_leaves_no_file_of_the_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report"
    report.mkdir()
    for name in ("records.jsonl", "sm100.xz", "sm100.xz.sig"):
        (report / name).write_text("of a run before\n")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "command", lambda name, args: [name, *args])
    monkeypatch.setattr(run, "carried_out", lambda *_: 2)
    assert offline.main(["rehearse", "--kind", "sm100", "--lane", "gpu"]) == 2
    assert [*report.iterdir()] == []


def test_a_run_on_a_machine_asks_its_gpu_for_the_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(offline, "run", lambda *words: asked.append(words) or 0)
    assert offline.main(["run", "BUNDLE", "--kind", "sm100", "--sign", "key", "-x"]) == 0
    assert asked == [(Path("BUNDLE"), "gpu", ["-x"], run.Carry(kind="sm100", key=Path("key")))]
    assert run.Carry(kind="sm100").args == ["--kind", "sm100"]


def test_a_key_without_a_file_to_sign_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[object] = []
    monkeypatch.setattr(offline, "run", lambda *words: ran.append(words) or 0)
    assert offline.main(["run", "BUNDLE", "--sign", "key"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == "offline: --sign = 'key' is not accepted; accepted: a key beside --kind"
    assert ran == [], "nothing runs for hours to end without the signature that was asked for"
