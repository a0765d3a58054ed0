"""The JSON Schema of a record, derived from its dataclasses; ``record.schema.json`` is a copy."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, get_args, get_origin, get_type_hints

from harness.core.record import FORMAT, Record

PLAIN = {str: "string", bool: "boolean", int: "integer", float: "number"}


def record_schema() -> dict[str, Any]:
    """What one line of a records file must be."""
    schema = _object(Record)
    schema["properties"] = {"format": {"const": FORMAT}} | schema["properties"]
    schema["required"] = ["format", *schema["required"]]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "specgate record",
        "description": "One trial. Errors may be Infinity, which Python's json reads and writes.",
    } | schema


def _object(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {
        "type": "object",
        "properties": {f.name: _schema(hints[f.name]) for f in fields(kind)},
        "required": [f.name for f in fields(kind)],
        "additionalProperties": False,
    }


def _schema(kind: Any) -> dict[str, Any]:
    if get_origin(kind) is tuple:
        return {"type": "array", "items": _schema(get_args(kind)[0])}
    if get_origin(kind) is dict:
        return {"type": "object", "additionalProperties": _schema(get_args(kind)[1])}
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return _object(kind)
    if issubclass(kind, StrEnum):
        return {"enum": [member.value for member in kind]}
    return {"type": PLAIN[kind]}
