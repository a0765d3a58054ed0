"""JSON Schema of a record, made from its dataclasses; ``record.schema.json`` is a copy."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from harness.core.record import RECORD_FORMAT, Record


class ClosedSchema(GenerateJsonSchema):
    """A schema whose objects have every field and no other, as ``Record.to_json`` writes them."""

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> dict[str, Any]:
        """The object of one dataclass."""
        fields = super().dataclass_schema(schema)
        return fields | {"required": list(fields["properties"]), "additionalProperties": False}

    def field_title_should_be_set(self, schema: Any) -> bool:
        """No: a title would repeat the field's name."""
        return False


def record_schema() -> dict[str, Any]:
    """The schema of one line of a records file."""
    schema = TypeAdapter(Record).json_schema(schema_generator=ClosedSchema)
    for definition in schema["$defs"].values():
        # A class's docstring is written for its readers in Python.
        definition.pop("description")
    schema["properties"] = {"format": {"const": RECORD_FORMAT}} | schema["properties"]
    schema["required"] = ["format", *schema["required"]]
    return {
        "$schema": ClosedSchema.schema_dialect,
        **schema,
        "title": "specgate record",
        "description": "One trial. Errors may be Infinity, which Python's json reads and writes.",
    }
