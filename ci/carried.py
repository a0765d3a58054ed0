"""Records in one file, to be carried from a machine without a network into a verdict elsewhere.

xz of lines: what the file is about, with the digest of the rest; then the records as they were. A
signature of ``ssh-keygen -Y`` may lie beside it, in a file of the same name and ".sig".
"""

from __future__ import annotations

import hashlib
import json
import lzma
import subprocess
from pathlib import Path
from typing import Any

from harness.core.record import Record, read_records, record_lines
from harness.core.tree import digest
from harness.errors import UsageError, rejected

SUFFIX = ".xz"
FORMAT = 1
NAMESPACE = "specgate"
"""Of signatures, so that one of something else does not fit."""
SIGNATURE = ".sig"
MOST_BYTES = 1 << 20


def pack(records: Path, kind: str, out: Path) -> Path:
    """Write the file.

    Args:
        records: ``records.jsonl`` of one run.
        kind: that the records must be of.
        out: the file, such as ``sm100.xz``.

    Raises:
        UsageError: there are no records, or they are of another kind or of several trees.
    """
    found = list(read_records(records))
    body = record_lines(found)
    head = {
        "carried": FORMAT,
        "kind": kind,
        "tree": found[0].environment.tree if found else "",
        "sha256": hashlib.sha256(body.encode()).hexdigest(),
    }
    _check(head, found, records)
    out.write_bytes(lzma.compress((json.dumps(head) + "\n" + body).encode(), preset=9))
    return out


def unpack(path: Path) -> list[Record]:
    """The records of a file.

    Raises:
        UsageError: it was changed or cut, is of another kind than it says, of another tree than
            this one, or holds records of another format; names the file.
    """
    try:
        first, _, body = lzma.decompress(path.read_bytes()).decode().partition("\n")
        head = json.loads(first)
        whole = hashlib.sha256(body.encode()).hexdigest()
    except (OSError, lzma.LZMAError, ValueError) as error:
        text = rejected("records", str(path), f"a file that carries records ({error})")
        raise UsageError(text) from error
    if not isinstance(head, dict) or head.get("carried") != FORMAT:
        raise UsageError(rejected("records", str(path), f"carried records of format {FORMAT}"))
    if head.get("sha256") != whole:
        raise UsageError(rejected(f"{path}: sha256", str(head.get("sha256"))[:12], whole[:12]))
    try:
        found = [Record.from_json(line) for line in body.splitlines()]
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    _check(head, found, path)
    if head["tree"] != digest():
        raise UsageError(rejected(f"{path}: tree", head["tree"][:12], digest()[:12]))
    return found


def sign(path: Path, key: Path) -> Path:
    """Sign a file; the signature's.

    Args:
        path: of the file.
        key: a private key of SSH, or the public one of a key that an agent holds.

    Raises:
        UsageError: ssh-keygen cannot; names what it said.
    """
    _keygen("--sign", str(key), "sign", "-f", str(key), "-n", NAMESPACE, str(path))
    return signature_of(path)


def signature_of(path: Path) -> Path:
    """Where the signature of a file is, if there is one."""
    return path.with_name(path.name + SIGNATURE)


def signer(path: Path, signers: Path) -> str:
    """Who signed a file.

    Args:
        path: of the file.
        signers: ssh-keygen's list of them: a name and a public key, a line each.

    Raises:
        UsageError: nobody of these did, or the file was changed since.
    """
    signature = signature_of(path)
    if not signature.is_file():
        raise UsageError(rejected("--signers", str(signature), "a signature beside each file"))
    known = ("-s", str(signature), "-f", str(signers))
    said = _keygen(f"{path}: signer", "unknown", "find-principals", *known)
    name = (said.splitlines() or [""])[0]
    who = ("-n", NAMESPACE, "-I", name)
    _keygen(f"{path}: signature", name, "verify", *known, *who, read=path)
    return name


def _check(head: dict[str, Any], found: list[Record], path: Path) -> None:
    if not found:
        raise UsageError(rejected("records", str(path), "one or more records"))
    for name, own in (
        ("kind", {record.kind for record in found}),
        ("tree", {record.environment.tree for record in found}),
    ):
        if own != {head.get(name)}:
            said = ", ".join(sorted(one[:12] or "unknown" for one in own))
            raise UsageError(rejected(f"{path}: {name}", said, str(head.get(name))[:12]))


def _keygen(field: str, value: str, *words: str, read: Path | None = None) -> str:
    given = b"" if read is None else read.read_bytes()
    try:
        done = subprocess.run(
            ["ssh-keygen", "-Y", *words], input=given, capture_output=True, check=False
        )
    except FileNotFoundError as error:
        raise UsageError("signatures need ssh-keygen, of OpenSSH 8.1 or newer") from error
    if done.returncode:
        said = (done.stderr or done.stdout).decode().strip().splitlines()
        cause = said[-1] if said else f"exit code {done.returncode}"
        raise UsageError(rejected(field, value, f"what ssh-keygen accepts ({cause})"))
    return done.stdout.decode()
