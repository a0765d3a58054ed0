"""``specgate contract``: the recorded contracts of SGLang's releases, and what changed.

  specgate contract 0.5.14 0.5.23             two recorded releases
  specgate contract 0.5.23 --source FOLDER    a recorded release and a folder that holds sglang/
  specgate contract 0.5.24 --write            record releases from their unpacked wheels

Ends with 0 where nothing differs, and with 1 where something does, recorded or not.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.version import Version

from harness.core.argument_types import CommandLine
from harness.core.paths import GOLDEN
from harness.errors import UsageError, rejected
from harness.upstream.contract import OWN, Contract, read_contract
from harness.upstream.flashinfer_calls import NAMED
from harness.upstream.released_wheel import FOLDER, cache

RECORDED = GOLDEN / "upstream"
RELEASE = re.compile(r"\d+(\.\d+)+((rc|\.post|\.dev)\d+)?")
STATED = re.compile(r"^__version__ = .*'(\S+)'$", re.MULTILINE)
ADDED, REMOVED, CHANGED = "+-~"


def releases() -> list[str]:
    """Versions that are recorded, the newest last."""
    return sorted((path.stem for path in RECORDED.glob("*.json")), key=Version)


def recorded(version: str) -> Contract:
    """The recorded contract of a release.

    Raises:
        UsageError: it is not recorded.
    """
    if version not in releases():
        raise UsageError(rejected("VERSION", version, f"one of {', '.join(releases())}"))
    contract: Contract = json.loads((RECORDED / f"{version}.json").read_bytes())
    return contract


def record(version: str, contract: Contract) -> None:
    """Write ``golden/upstream/VERSION.json``, one member a line."""
    RECORDED.mkdir(parents=True, exist_ok=True)
    text = json.dumps(contract, sort_keys=True, indent=1, ensure_ascii=False)
    (RECORDED / f"{version}.json").write_text(f"{text}\n", encoding="utf-8")


def read_release(version: str, root: Path) -> Contract:
    """The contract of a release under ``root``.

    Raises:
        UsageError: the folder has no such contract, or states another version.
    """
    contract = read_contract(root)
    stated = root / "sglang/_version.py"
    found = STATED.search(stated.read_text(encoding="utf-8")) if stated.is_file() else None
    if found and found[1] != version:
        raise UsageError(rejected("VERSION", version, f"{found[1]}, which {root} states"))
    return contract


def differences(old: Contract, new: Contract) -> Iterator[str]:
    """One line per member that was added, removed or changed; one per class that came or went."""
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name, {}), new.get(name, {})
        if not before or not after:
            whole, mark = (after, ADDED) if after else (before, REMOVED)
            own = whole.get(OWN) or f"called in {whole[NAMED]}"
            yield f"{mark} {name}: {own}, members: {len(whole) - 1}"
            continue
        for member in sorted(before.keys() | after.keys()):
            was, now = before.get(member), after.get(member)
            if was is None:
                yield f"{ADDED} {name}.{member}: {now}"
            elif now is None:
                yield f"{REMOVED} {name}.{member}: {was}"
            elif was != now:
                yield f"{CHANGED} {name}.{member}: {was} → {now}"


def _report(old: str, new: str, lines: Sequence[str]) -> int:
    print(*lines, sep="\n", end="\n" if lines else "")
    counts = [sum(line[0] == mark for line in lines) for mark in (ADDED, REMOVED, CHANGED)]
    print("{} to {}: {} added, {} removed, {} changed".format(old, new, *counts))
    return int(bool(lines))


def _write(versions: Sequence[str], source: Path | None) -> int:
    if not versions or (source and len(versions) > 1):
        accepted = "one, of the folder" if source else "one or more"
        raise UsageError(rejected("VERSION with --write", " ".join(versions), accepted))
    for version in versions:
        if not RELEASE.fullmatch(version):
            raise UsageError(rejected("VERSION", version, "a release such as 0.5.23"))
    read = {version: read_release(version, source or cache() / version) for version in versions}
    code = 0
    for version, contract in read.items():
        old = recorded(version) if version in releases() else {}
        record(version, contract)
        code |= _report("recorded", version, list(differences(old, contract)))
    return code


def _compare(versions: Sequence[str], source: Path | None) -> int:
    if len(versions) != 2 - bool(source):
        accepted = "one beside --source" if source else "two, or one beside --source"
        raise UsageError(rejected("VERSION", " ".join(versions), accepted))
    contracts = [recorded(version) for version in versions]
    if source:
        contracts.append(read_contract(source))
    new = str(source or versions[-1])
    return _report(versions[0], new, list(differences(*contracts)))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of ``specgate contract``.

    Args:
        argv: the command line without the program's name; the process's own if None.
    """
    parser = CommandLine(prog="specgate contract", description=__doc__)
    which = f"of sglang, such as {releases()[-1]}" if releases() else "of sglang"
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=which)
    held = f"holds sglang/, instead of {cache()}/VERSION ({FOLDER} names another folder)"
    parser.add_argument("--source", type=Path, metavar="FOLDER", help=held)
    parser.add_argument("--write", action="store_true", help="record in golden/upstream")
    options = parser.parse_args(argv)
    try:
        return (_write if options.write else _compare)(options.versions, options.source)
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
