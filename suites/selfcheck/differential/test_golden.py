"""Recording never passes; a golden that is missing, stale, corrupt or orphaned is reported."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from fixtures.pytest_plugin.shards import OTHER_PARTS
from harness.differential.golden import (
    Golden,
    GoldenOutcome,
    GoldenStore,
    Identity,
    Workflow,
    digest,
    digest_of_tensors,
)
from harness.errors import GoldenError

pytest_plugins = ["pytester"]

IDENTITY = Identity(case=digest({"id": "edge", "lens": [3, 5]}), oracle=1, seed=7, weights="w0")
LOGITS = torch.arange(6.0).view(2, 3)


def answer(value=0.0):
    return Golden(
        identity=IDENTITY, tensors={"logits": LOGITS + value}, facts={"accept_lengths": [2, 4]}
    )


def never():
    raise AssertionError("verify computes nothing")


def settle(folder, workflow, *, key="edge", value=0.0, identity=IDENTITY, flush=True):
    store = GoldenStore(folder, workflow, origin={"torch": "2.x", "run": str(value)})
    compute = never if workflow is Workflow.VERIFY else lambda: answer(value)
    golden, outcome = store.settle("mha", key, identity, compute)
    if flush:
        store.flush()
    return golden, outcome


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "golden"
    settle(path, Workflow.ADD)
    return path


def test_the_life_of_a_golden(tmp_path):
    folder = tmp_path / "golden"
    with pytest.raises(GoldenError, match=r"mha\.safetensors has no golden 'edge'; .* golden add$"):
        settle(folder, Workflow.VERIFY)
    assert content(folder) == {}

    assert settle(folder, Workflow.ADD)[1] is GoldenOutcome.ADDED
    golden, outcome = settle(folder, Workflow.VERIFY)
    assert outcome is GoldenOutcome.VERIFIED
    assert golden.says_the_same(answer())
    assert golden.origin == {"torch": "2.x", "run": "0.0"}

    assert settle(folder, Workflow.ADD, value=9.0)[1] is GoldenOutcome.VERIFIED
    before = content(folder)
    assert settle(folder, Workflow.REWRITE)[1] is GoldenOutcome.VERIFIED
    assert content(folder) == before

    assert settle(folder, Workflow.REWRITE, value=1.0)[1] is GoldenOutcome.REWRITTEN
    golden, outcome = settle(folder, Workflow.VERIFY)
    assert golden.tensors["logits"].tolist() == (LOGITS + 1).tolist()
    assert golden.origin["run"] == "1.0"


def test_only_verified_is_green():
    assert [outcome.value for outcome in GoldenOutcome if not outcome.is_red] == ["verified"]


@pytest.mark.parametrize("workflow", [Workflow.VERIFY, Workflow.ADD])
@pytest.mark.parametrize("field", [field.name for field in fields(Identity)])
def test_a_stale_golden_says_what_changed(folder, workflow, field):
    other = 8 if isinstance(getattr(IDENTITY, field), int) else "other"
    changed = replace(IDENTITY, **{field: other})
    with pytest.raises(GoldenError, match=f"'edge' is stale: {field} changed; .* golden rewrite$"):
        settle(folder, workflow, identity=changed)
    assert settle(folder, Workflow.REWRITE, identity=changed)[1] is GoldenOutcome.REWRITTEN
    assert settle(folder, Workflow.VERIFY, identity=changed)[1] is GoldenOutcome.VERIFIED


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def edit_manifest(change):
    def apply(path):
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return apply


def recorded_as_if_meant(data):
    def apply(path):
        path.write_bytes(data)
        manifest = path.with_name("manifest.json")
        digests = json.loads(manifest.read_text())
        digests["files"][path.name] = hashlib.sha256(data).hexdigest()
        manifest.write_text(json.dumps(digests))

    return apply


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("mha.safetensors", truncate, r"mha\.safetensors is corrupt: its digest"),
        ("mha.json", truncate, r"mha\.json is corrupt: its digest"),
        ("mha.safetensors", os.remove, r"mha\.safetensors is missing"),
        ("manifest.json", truncate, r"manifest\.json is corrupt: JSONDecodeError"),
        ("manifest.json", lambda p: p.write_text("[]"), r"manifest\.json is corrupt: TypeError"),
        ("manifest.json", os.remove, r"manifest\.json is missing"),
        ("mha.safetensors", recorded_as_if_meant(b"\xff" * 40), r"mha is corrupt: SafetensorError"),
        ("mha.json", recorded_as_if_meant(b"{"), r"mha is corrupt: JSONDecodeError"),
        (
            "manifest.json",
            edit_manifest(lambda d: d.update(format=0)),
            r"manifest\.json has format 0, expected 2",
        ),
        (
            # What made a golden in an older format is no damage of this one's files.
            "manifest.json",
            edit_manifest(lambda d: d.update(format=1, files={})),
            r"manifest\.json has format 1, expected 2",
        ),
        (
            "manifest.json",
            lambda p: p.write_text('{"format": 1, "goldens": {}}'),
            r"manifest\.json has format 1, expected 2",
        ),
        (
            "manifest.json",
            edit_manifest(lambda d: d["files"].pop("mha.json")),
            r"manifest\.json is corrupt: its files are not those of its entries",
        ),
        (
            "manifest.json",
            edit_manifest(lambda d: d["entries"]["mha"].update(more={})),
            r"manifest\.json does not list what mha\.json holds",
        ),
        (
            # As a merge leaves it that takes one side's entries and the other's files.
            "mha.json",
            recorded_as_if_meant(b'{"edge": {}, "lost": {}}'),
            r"manifest\.json does not list what mha\.json holds",
        ),
        (
            "manifest.json",
            edit_manifest(lambda d: d["entries"].pop("mha")),
            r"manifest\.json is corrupt: its files are not those of its entries",
        ),
    ],
)
def test_damage_is_named_and_a_rewrite_mends_it(folder, name, damage, said):
    damage(folder / name)
    for workflow in (Workflow.VERIFY, Workflow.ADD):
        with pytest.raises(
            GoldenError, match=said + ".*git checkout golden; .* golden rewrite$"
        ) as caught:
            settle(folder, workflow)
        assert "\n" not in str(caught.value)
    assert settle(folder, Workflow.REWRITE)[1].is_red
    assert settle(folder, Workflow.VERIFY)[1] is GoldenOutcome.VERIFIED


@pytest.mark.parametrize("stray", ["mla.json", "mla.safetensors"])
def test_a_file_that_nobody_knows_is_an_orphan(folder, stray):
    (folder / "README.md").write_text("allowed")
    (folder / stray).write_text("{}")
    with pytest.raises(GoldenError, match=rf"{stray} is an orphan"):
        settle(folder, Workflow.VERIFY)
    settle(folder, Workflow.REWRITE, value=2.0)
    assert set(content(folder)) == {"README.md", "manifest.json", "mha.json", "mha.safetensors"}


def test_goldens_that_nothing_plans_are_orphans_until_a_rewrite(folder):
    settle(folder, Workflow.ADD, key="edge/longer")
    store = GoldenStore(folder)
    assert store.orphans([("mha", "edge"), ("mha", "edge/longer")]) == []
    (line,) = store.orphans([("mha", "edge"), ("mla", "edge/longer")])
    assert "mha.safetensors has an orphan golden 'edge/longer'; drop it with: " in line

    rewriting = GoldenStore(folder, Workflow.REWRITE)
    assert len(rewriting.orphans([("mha", "edge/longer")])) == 1
    rewriting.flush()
    golden, _ = settle(folder, Workflow.VERIFY, key="edge/longer")
    assert list(golden.tensors) == ["logits"]
    with pytest.raises(GoldenError, match="has no golden 'edge'"):
        settle(folder, Workflow.VERIFY)

    emptying = GoldenStore(folder, Workflow.REWRITE)
    assert len(emptying.orphans([])) == 1
    emptying.flush()
    assert set(content(folder)) == {"manifest.json"}


@pytest.mark.parametrize("fitting", [0, 1, 2])
def test_nothing_is_written_before_flush_nor_when_flushing_fails(folder, monkeypatch, fitting):
    before = content(folder)
    settle(folder, Workflow.REWRITE, value=3.0, flush=False)
    assert content(folder) == before

    write, written = Path.write_bytes, []

    def full(path, data):
        if len(written) == fitting:
            raise OSError(28, "No space left on device")
        written.append(path)
        return write(path, data)

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(GoldenError, match=r"cannot be written: .*No space left"):
        settle(folder, Workflow.REWRITE, value=3.0)
    monkeypatch.undo()
    assert content(folder) == before
    assert settle(folder, Workflow.VERIFY)[1] is GoldenOutcome.VERIFIED


def test_a_recording_that_was_killed_is_told_by_the_files_that_the_old_manifest_lacks(
    folder, monkeypatch
):
    old = content(folder)["manifest.json"]
    replace_file, replaced = os.replace, []

    def killed(source, place):
        if replaced:
            raise KeyboardInterrupt
        replaced.append(place)
        replace_file(source, place)

    store = GoldenStore(folder, Workflow.ADD)
    store.settle("mla", "edge", IDENTITY, lambda: answer(5.0))
    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        store.flush()
    monkeypatch.undo()
    said = "the manifest takes its place after every file that it lists"
    assert content(folder)["manifest.json"] == old, said
    with pytest.raises(GoldenError, match=r"mla\.\w+ is an orphan"):
        settle(folder, Workflow.VERIFY)


def test_a_store_that_was_flushed_records_on(folder):
    store = GoldenStore(folder, Workflow.ADD)
    for group, value in (("mla", 5.0), ("swa", 7.0)):
        store.settle(group, "edge", IDENTITY, lambda value=value: answer(value))
        try:
            store.flush()
        except KeyError as error:
            pytest.fail(f"a flush writes what was recorded since the flush before, not {error!r}")
    both = GoldenStore(folder)
    assert both.damage() == "", "a flush keeps what the flush before recorded"
    for group, value in (("mha", 0.0), ("mla", 5.0), ("swa", 7.0)):
        golden, _ = both.settle(group, "edge", IDENTITY, never)
        said = f"the golden of {group} is what was recorded before or after a flush: {value}"
        assert golden.says_the_same(answer(value)), said


def test_a_key_that_another_one_begins_with_has_its_own_tensors(folder):
    # Tensors are read in any order, so that a name of its own is what shows at each run.
    longer = replace(answer(), tensors={"hidden_states": LOGITS + 3})
    store = GoldenStore(folder, Workflow.ADD)
    store.settle("mha", "edge/longer", IDENTITY, lambda: longer)
    store.flush()
    golden, _ = settle(folder, Workflow.VERIFY)
    said = "the golden of edge holds its own logits, and no tensor of edge/longer"
    assert golden.says_the_same(answer(0.0)), f"{said}: {golden.tensors}"


def test_damage_of_any_group_is_told(folder):
    store = GoldenStore(folder, Workflow.ADD)
    store.settle("mla", "edge", IDENTITY, lambda: answer(5.0))
    store.flush()
    assert GoldenStore(folder).damage() == ""
    truncate(folder / "mla.json")
    told = GoldenStore(folder).damage()
    said = "a damaged file is told, also where the goldens of the first group are whole"
    assert "mla.json is corrupt" in told, f"{said}: {told!r}"


def test_groups_are_files_of_their_own(folder):
    store = GoldenStore(folder, Workflow.ADD)
    store.settle("mla", "edge", IDENTITY, lambda: answer(5.0))
    untouched = (folder / "mha.safetensors").stat().st_mtime_ns
    store.flush()
    store.flush()
    assert (folder / "mha.safetensors").stat().st_mtime_ns == untouched
    both = GoldenStore(folder)
    for group, value in (("mha", 0.0), ("mla", 5.0)):
        golden, _ = both.settle(group, "edge", IDENTITY, never)
        assert golden.says_the_same(answer(value))


@pytest.mark.parametrize(
    "other",
    [
        replace(answer(), tensors={"logits": LOGITS.double()}),
        replace(answer(), tensors={}),
        replace(answer(), facts={"accept_lengths": [4, 2]}),
        replace(answer(), identity=replace(IDENTITY, seed=8)),
        answer(torch.nan),
    ],
)
def test_answers_that_differ(other):
    assert not other.says_the_same(answer())
    assert not answer(torch.nan).says_the_same(answer(torch.nan))


def test_digests_depend_on_everything_but_order():
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1}) != digest({"a": 1, "b": [3]})
    one = {"a": torch.ones(2, 3), "b": torch.zeros(1, dtype=torch.bfloat16)}
    assert digest_of_tensors(one) == digest_of_tensors(dict(reversed(one.items())))
    for changed in (
        {"a": torch.ones(3, 2), "b": one["b"]},
        {"a": torch.ones(2, 3), "b": torch.zeros(1, dtype=torch.float16)},
        {"a": torch.ones(2, 3), "c": one["b"]},
    ):
        assert digest_of_tensors(changed) != digest_of_tensors(one)


READERS = """
import pytest

@pytest.mark.parametrize("number", range(20))
def test_row(number, goldens):
    assert goldens.manifest["entries"]

@pytest.mark.usefixtures("recorded")
def test_prompt():
    pass

def test_other():
    pass
"""


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("mha.safetensors", truncate),
        ("mha.safetensors", lambda path: path.write_bytes(path.read_bytes()[::-1])),
        ("mha.json", lambda path: path.write_text("{")),
        ("manifest.json", truncate),
        ("manifest.json", os.remove),
    ],
    ids=["truncated", "flipped", "broken-json", "broken-manifest", "no-manifest"],
)
def test_damaged_goldens_are_one_failure(pytester, monkeypatch, folder, name, damage):
    monkeypatch.setattr("fixtures.pytest_plugin.goldens.FOLDER", folder)
    pytester.makepyfile(READERS)
    plugins = ("-p", "fixtures.pytest_plugin.shards", "-p", "fixtures.pytest_plugin.goldens")
    assert pytester.runpytest_inprocess(*plugins).ret == 0
    damage(folder / name)
    planned = []

    class Counting:
        def pytest_sessionfinish(self, session):
            planned.append(len(session.items) + len(session.config.stash[OTHER_PARTS]))

    result = pytester.runpytest_inprocess(*plugins, plugins=[Counting()])
    result.assert_outcomes(passed=1, failed=1, deselected=21)
    told = "trials that do not run because goldens are damaged are planned all the same"
    assert planned == [1 + 1 + 21], told
    pytester.runpytest_inprocess(*plugins, "--shard", "1/2", plugins=[Counting()])
    assert planned[1:] == [1 + 1 + 21], f"{told}, beside those of other parts"
    text = str(result.stdout)
    assert "; undo it with: git checkout golden; if the change is meant: python3 -m" in text
    assert len(result.outlines) < 20
    assert "Traceback" not in text
    result = pytester.runpytest_inprocess(*plugins, "-k", "other")
    result.assert_outcomes(passed=1, deselected=21)


def test_a_stale_golden_fails_by_one_line(pytester, monkeypatch, folder):
    monkeypatch.setattr("fixtures.pytest_plugin.goldens.FOLDER", folder)
    pytester.makepyfile(
        """
        from harness.differential.golden import Identity

        def test_row(goldens):
            goldens.settle("mha", "edge", Identity(case="0", oracle=1, seed=7, weights="w0"), None)
        """
    )
    result = pytester.runpytest_inprocess(
        "-p", "fixtures.pytest_plugin.shards", "-p", "fixtures.pytest_plugin.goldens"
    )
    result.assert_outcomes(failed=1)
    assert "is stale: case changed; if the change is meant: python3" in str(result.stdout)
    assert len(result.outlines) < 20
