"""Mutants that nobody wrote: every place once, one token each, kept with what they changed."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from fixtures import operators
from fixtures.mutants import Fate, Outcome
from fixtures.mutation.planting import locate
from fixtures.operators import Drawn, main, show
from fixtures.tables.mutants.mutant import Text
from harness.core.paths import ROOT

pytestmark = pytest.mark.untraced
SOURCE = '''\
"""A docstring with 1 + 1."""
from __future__ import annotations


def clipped(x: int | None, most: int) -> int | None:
    if x is None or x < most:
        return x
    return most + 1


def other(x: int | None, most: int) -> int | None:
    if x is None or x < most:
        return x
    return most - 1
'''


Draw = Callable[[Path, int], Iterator[Text]]
LIBRARY = "fixtures.mutation.operators"


@pytest.fixture(autouse=True)
def library() -> None:
    if os.environ.get("TOX_ENV_NAME") != "test":
        pytest.importorskip("cosmic_ray", reason="needs cosmic-ray: pip install -e '.[operators]'")


@pytest.fixture
def drawn(library: None) -> Draw:
    return cast("Draw", import_module(LIBRARY).drawn)


@pytest.fixture
def root(tmp_path: Path, library: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci" / "gate.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.setattr(f"{LIBRARY}.SOURCES", ("ci/gate.py", "harness/none"))
    return tmp_path


def outcome(mutant: Text, fate: Fate) -> Outcome:
    return Outcome(
        id=mutant.id, effect=mutant.effect, fate=fate, test="", message="", asked=1, seconds=1.0
    )


def test_each_place_is_drawn_once_and_annotations_are_none(drawn: Draw, root: Path) -> None:
    draws = [[*drawn(root, seed)] for seed in range(1, 30)]
    effects = {mutant.effect for mutants in draws for mutant in mutants}
    assert all("None:" not in effect.partition(" -> ")[0].split("def")[-1] for effect in effects)
    condition = "if x is None or x < most:"
    assert effects >= {
        f"{condition} -> if x is not None or x < most:",
        f"{condition} -> if x is None and x < most:",
        f"{condition} -> if x is None or x <= most:",
        f"{condition} -> if x is None or x >= most:",
        "return most + 1 -> return most - 1",
        "return most - 1 -> return most + 1",
    }
    # Of each function `is`, `or`, `<`, the condition, the sign and the number are a place.
    assert {*map(len, draws)} == {12}


def test_a_seed_draws_the_same_again_and_another_one_others(drawn: Draw, root: Path) -> None:
    first = [mutant.id for mutant in drawn(root, 7)]
    assert first == [mutant.id for mutant in drawn(root, 7)]
    assert first != [mutant.id for mutant in drawn(root, 8)]
    assert len({*first}) == 12


def test_every_drawn_mutant_can_be_planted(drawn: Draw, root: Path) -> None:
    for mutant in drawn(root, 3):
        site = locate(mutant, root)
        assert SOURCE.count(mutant.old) == 1
        assert len(site.lines) <= 4, "a few lines tell a place from another like it"


def test_the_sources_are_there() -> None:
    assert all((ROOT / name).exists() for name in import_module(LIBRARY).SOURCES)


def test_what_was_judged_is_kept_with_its_text_and_forgotten_with_it(
    drawn: Draw, root: Path, tmp_path: Path
) -> None:
    path = tmp_path / "operators.jsonl"
    kept = Drawn(path, root)
    sign, *others = sorted(drawn(root, 1), key=lambda m: "most + 1 ->" not in m.effect)
    kept.mutants |= {mutant.id: mutant for mutant in (sign, *others)}
    kept.add(outcome(sign, Fate.SURVIVED))
    for mutant in others:
        kept.add(outcome(mutant, Fate.KILLED))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["id"] for row in rows} == {sign.id, *(mutant.id for mutant in others)}
    assert rows[0]["old"] == "    return most + 1\n"

    again = Drawn(path, root)
    assert again.missed() == [sign]
    assert again.more(drawn(root, 1), 5) == []
    source = root / "ci" / "gate.py"
    source.write_text(SOURCE.replace("return most + 1", "return most + 2"), encoding="utf-8")
    changed = Drawn(path, root)
    assert changed.missed() == []
    assert len(changed.more(drawn(root, 1), 5)) == 2, "the sign and the number of that line"


@pytest.mark.parametrize(
    ("fates", "said"),
    [
        ((Fate.KILLED, Fate.HUNG, Fate.BROKEN), "3 of 3 that tests execute noticed"),
        ((Fate.KILLED, Fate.EQUIVALENT), "1 of 1 that tests execute noticed"),
        ((Fate.KILLED, Fate.SURVIVED), "1 of 2 that tests execute noticed"),
        ((Fate.KILLED, Fate.UNEXECUTED), "1 of 1 that tests execute noticed"),
    ],
)
def test_the_share_leaves_out_what_cannot_be_seen_and_what_nobody_executes(
    drawn: Draw, root: Path, tmp_path: Path, fates: tuple[Fate, ...], said: str
) -> None:
    kept = Drawn(tmp_path / "operators.jsonl", root)
    for mutant, fate in zip(drawn(root, 1), fates, strict=False):
        kept.mutants[mutant.id] = mutant
        kept.add(outcome(mutant, fate))
    out = io.StringIO()
    show(kept, Console(file=out, width=200))
    assert said in out.getvalue()
    missed = out.getvalue().count("\n") - 1
    assert missed == sum(fate in (Fate.SURVIVED, Fate.UNEXECUTED) for fate in fates)


@pytest.mark.parametrize(("fate", "code"), [(Fate.KILLED, 0), (Fate.SURVIVED, 1)])
def test_the_exit_code_is_about_those_that_were_asked(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: Fate, code: int
) -> None:
    asked: list[Text] = []

    def judged(mutants: list[Text], workers: int, report: Path, kept: Drawn, *rest: object) -> None:
        asked.extend(mutants)
        for mutant in mutants:
            kept.add(outcome(mutant, fate))

    monkeypatch.setattr(operators, "ROOT", root)
    monkeypatch.setattr(operators, "judged", judged)
    words = ["--kept", str(tmp_path / "kept.jsonl")]
    assert main(["3", *words]) == code
    assert main(words) == 0, "nothing was asked"
    assert main(["4", *words]) == code
    assert len({mutant.id for mutant in asked}) == 7, "nobody is asked twice"
    assert main(["--missed", *words]) == code
    assert len(asked) == (14 if code else 7)


def test_nothing_is_run_without_a_number(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operators, "ROOT", root)
    assert main(["--kept", str(tmp_path / "none.jsonl")]) == 0
    assert capsys.readouterr().out == "0 mutants: ; 0 of 0 that tests execute noticed\n"
