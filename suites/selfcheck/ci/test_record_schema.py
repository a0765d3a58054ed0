"""The published schema of a record accepts every record and nothing else."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import jsonschema
import pytest

from harness.core.paths import ROOT
from harness.core.record import Environment, Quantity, Record, TokenCounts, Verdict
from harness.core.record_schema import record_schema
from harness.errors import UsageError

PUBLISHED = json.loads((ROOT / "harness" / "core" / "record.schema.json").read_text())
RECORD = Record(
    case="edge",
    subject="trtllm_mha/xqa",
    family="mha",
    mode="target_verify",
    execution="graph",
    device="cpu",
    verdict=Verdict.WRONG_NUMBERS,
    message="one line",
    quantities=(Quantity(name="logits", error=math.inf, allowed=1e-3, where="row 1"),),
    effects={"host_syncs": 0},
    accept_lengths=(2, 4),
    tokens=TokenCounts(judged=7, tied=2, unjudged=1),
    seconds=0.5,
    environment=Environment(
        python="3.12", torch="2.x", platform="linux", processor="p", device="cpu"
    ),
    reproduce="pytest -k edge",
)


def test_the_published_schema_is_the_derived_one():
    assert record_schema() == PUBLISHED, "write json.dumps(record_schema(), indent=2) to the file"
    jsonschema.Draft202012Validator.check_schema(PUBLISHED)


@pytest.mark.parametrize("verdict", Verdict)
def test_records_are_valid(verdict):
    data = json.loads(RECORD.to_json()) | {"verdict": verdict.value}
    jsonschema.validate(data, PUBLISHED)
    assert Record.from_json(json.dumps(data)).verdict is verdict


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"verdict": "fine"}, "'fine' is not one of"),
        ({"format": 2}, "1 was expected"),
        ({"effects": {"host_syncs": 0.5}}, "0.5 is not of type 'integer'"),
        ({"accept_lengths": [2, "4"]}, "'4' is not of type 'integer'"),
        ({"tokens": {"judged": 7}}, "'tied' is a required property"),
        ({"quantities": [{"name": "logits"}]}, "'error' is a required property"),
        ({"surprise": 1}, "'surprise' was unexpected"),
        ({"seconds": "0.5"}, "'0.5' is not of type 'number'"),
    ],
)
def test_anything_else_is_not(change, said):
    with pytest.raises(jsonschema.ValidationError, match=said):
        jsonschema.validate(json.loads(RECORD.to_json()) | change, PUBLISHED)


def test_a_record_without_its_format_is_refused():
    data = json.loads(RECORD.to_json())
    del data["format"]
    with pytest.raises(UsageError, match=r"^record format = None is not accepted; accepted: 1"):
        Record.from_json(json.dumps(data))


def test_a_record_is_read_that_is_older_than_its_newest_fields():
    data = json.loads(RECORD.to_json())
    for newer in ("axes", "tokens", "test", "planned", "kind", "recorded"):
        del data[newer]
    said = "records made before tokens were counted and plans had a kind can still be read"
    try:
        found = Record.from_json(json.dumps(data))
    except UsageError as error:
        pytest.fail(f"{said}: {error}")
    assert found == replace(RECORD, tokens=TokenCounts()), said
    assert found.place == "cpu", said


def test_a_record_needs_its_environment():
    data = json.loads(RECORD.to_json())
    del data["environment"]["torch"]
    with pytest.raises(jsonschema.ValidationError, match="'torch' is a required property"):
        jsonschema.validate(data, PUBLISHED)
