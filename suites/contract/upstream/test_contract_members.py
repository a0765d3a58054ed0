"""Every member of SGLang's newest interface is here, or not, as its row says."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

from fixtures.tables.upstream_contract import (
    BACKEND,
    MEMBERS,
    MIRRORED,
    MODE,
    OLDER,
    REFUSED,
    STEPS,
    MemberRow,
    OlderRow,
)
from fixtures.toys.toy_attention import DIM, HEADS, KV_HEADS, mha_layer
from fixtures.toys.toy_planning import batch_for, toy_backend
from harness.attention.trtllm_mha import TRTLLMHAAttnBackend
from harness.core.paths import ROOT
from harness.errors import KernelRefusal
from harness.upstream.base_attn_backend import (
    AttentionBackend,
    MultiStepDraftBackend,
    SharedReadEnds,
)
from harness.upstream.contract import OWN, WATCHED, Contract, WatchedClass
from harness.upstream.contract_watch import recorded, releases
from harness.upstream.forward_batch_info import ForwardMode
from harness.upstream.older_contracts import OlderContracts
from harness.upstream.verify_mask import VerifyMask

OURS: dict[str, type] = {
    BACKEND: AttentionBackend,
    MODE: ForwardMode,
    STEPS: MultiStepDraftBackend,
}
OLDER_OURS = OURS | {BACKEND: OlderContracts}
SGLANG_NAMES = {"batch": "forward_batch"}
"""Parameters whose name differs: ours, and SGLang's."""
CONTRACTS = {version: recorded(version) for version in releases()}
NEWEST = CONTRACTS[releases()[-1]]


def members(contract: Contract, owner: str) -> dict[str, str]:
    """Text of each member; of ``ForwardMode`` the modes, of which its methods follow."""
    return {
        name: text
        for name, text in contract[owner].items()
        if name != OWN and (owner != MODE or text.startswith("enum member"))
    }


def described(owner: type, name: str) -> str:
    """A member of ours, worded as a recorded one is."""
    value = inspect.getattr_static(owner, name)
    if isinstance(value, property):
        return "property"
    if isinstance(value, ForwardMode):
        return "enum member = auto()"
    if not inspect.isfunction(value):
        return f"attribute: {type(value).__name__} = {value!r}"
    parameters = [
        one.replace(name=SGLANG_NAMES.get(one.name, one.name), annotation=one.empty)
        for one in inspect.signature(value).parameters.values()
    ]
    return f"method {inspect.Signature(parameters)}"


def id_of(row: MemberRow | OlderRow) -> str:
    return f"{row.owner}.{row.member}"


@pytest.mark.parametrize("owner", OURS)
def test_every_member_has_one_row_and_every_row_its_member(owner: str) -> None:
    rows = [row.member for row in MEMBERS if row.owner == owner]
    assert sorted(rows) == sorted(members(NEWEST, owner))


@pytest.mark.parametrize("row", [row for row in MEMBERS if row.stance is MIRRORED], ids=id_of)
def test_a_mirrored_member_is_as_it_is_upstream(row: MemberRow) -> None:
    assert described(OURS[row.owner], row.member) == NEWEST[row.owner][row.member]


@pytest.mark.parametrize("row", [row for row in MEMBERS if row.stance is not MIRRORED], ids=id_of)
def test_any_other_member_is_not_here(row: MemberRow) -> None:
    assert row.member not in vars(OURS[row.owner])


@pytest.mark.parametrize("row", OLDER, ids=id_of)
def test_an_older_member_is_as_it_was_in_its_last_release(row: OlderRow) -> None:
    having = [version for version, one in CONTRACTS.items() if row.member in one[row.owner]]
    assert having[-1] == row.last != releases()[-1]
    ours, theirs = OLDER_OURS[row.owner], CONTRACTS[row.last][row.owner]
    assert described(ours, row.member) == theirs[row.member]


def test_whatever_a_backend_or_a_mode_offers_is_sglangs() -> None:
    mirrored = {id_of(row) for row in MEMBERS if row.stance is MIRRORED}
    modes = {id_of(row) for row in OLDER if row.owner == MODE}
    # A hook that subclasses override may be private by name.
    names = {name for name in vars(AttentionBackend) if not name.startswith("_")}
    names |= {row.member for row in MEMBERS if row.owner == BACKEND} & set(vars(AttentionBackend))
    ours = {f"{BACKEND}.{name}" for name in names} | {f"{MODE}.{mode.name}" for mode in ForwardMode}
    assert ours == {name for name in mirrored | modes if not name.startswith(STEPS)}


def test_whatever_the_adapter_of_older_releases_offers_was_theirs() -> None:
    fields = {field.name for field in dataclasses.fields(OlderContracts)}
    hooks = {name for name in vars(OlderContracts) if not name.startswith("_")} - fields
    assert hooks == {row.member for row in OLDER if row.owner == BACKEND}


def test_ends_of_shared_reads_are_sglangs() -> None:
    ours = {end.name: f"enum member = {end.value}" for end in SharedReadEnds}
    assert ours.items() <= NEWEST["SharedReadEnds"].items()
    assert len(ours) == sum(text.startswith("enum") for text in NEWEST["SharedReadEnds"].values())


def test_a_verify_mask_has_sglangs_fields_but_for_the_reader() -> None:
    ours = {field.name for field in dataclasses.fields(VerifyMask)}
    theirs = {name for name in NEWEST["VerifyMask"] if name not in (OWN, "fits")}
    assert ours == theirs - {"is_read"}


def test_rows_say_why_in_one_line() -> None:
    for row in (*MEMBERS, *OLDER):
        assert row.why, id_of(row)
        assert "\n" not in row.why, id_of(row)


def test_only_ragged_verifies_are_refused_and_a_kernel_refuses_them() -> None:
    assert [row.member for row in MEMBERS if row.stance is REFUSED] == [
        "supports_ragged_verify_graph"
    ]
    backend = toy_backend()
    assert isinstance(backend, TRTLLMHAAttnBackend)
    is_decode = ForwardMode.TARGET_VERIFY in backend.decode_kernel_modes
    assert is_decode, "a uniform TARGET_VERIFY runs on the decode kernel, not on the context kernel"
    batch = batch_for(backend, ForwardMode.TARGET_VERIFY, [9, 8], 5)
    backend.init_forward_metadata(batch)
    q, kv = torch.ones(5, HEADS, DIM), torch.ones(5, KV_HEADS, DIM)
    with pytest.raises(KernelRefusal, match=r"q rows = 5 .* 6 = 2 rows of block_tables x 3"):
        backend.forward(q, kv, kv, mha_layer(), batch)


def test_the_interface_has_grown() -> None:
    counts = {version: len(members(one, BACKEND)) for version, one in CONTRACTS.items()}
    assert {"0.5.12": 14, "0.5.14": 20, "0.5.23": 46}.items() <= counts.items()


def test_draft_extend_v1_ended_with_0_5_13() -> None:
    having = [version for version, one in CONTRACTS.items() if "DRAFT_EXTEND" in one[MODE]]
    assert having == ["0.5.12", "0.5.13"]
    assert all("DRAFT_EXTEND_V2" in one[MODE] for one in CONTRACTS.values())


@pytest.mark.parametrize("watched", WATCHED, ids=lambda one: one.name)
def test_a_class_is_recorded_since_its_first_release(watched: WatchedClass) -> None:
    having = [version for version, one in CONTRACTS.items() if watched.name in one]
    first = releases().index(watched.since) if watched.since else 0
    assert having == releases()[first:]


@pytest.mark.parametrize("version", CONTRACTS)
def test_a_recorded_contract_has_one_member_a_line(version: str) -> None:
    text = (ROOT / f"golden/upstream/{version}.json").read_text(encoding="utf-8")
    contract = CONTRACTS[version]
    lines = sum(len(one) + 2 for one in contract.values()) + 2
    assert len(text.splitlines()) == lines
    assert list(contract) == sorted(contract)
    assert all(list(one) == sorted(one) for one in contract.values())
