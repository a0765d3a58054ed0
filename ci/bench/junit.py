"""JUnit XML: regressed is a failure, blind and invalid are errors, inconclusive is skipped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from xml.etree import ElementTree as Xml

from ci.bench.case_report import CaseReport, number
from harness.bench.stats.bench_verdict import BenchVerdict

ELEMENTS = {
    BenchVerdict.REGRESSED: "failure",
    BenchVerdict.BLIND: "error",
    BenchVerdict.INVALID: "error",
    BenchVerdict.INCONCLUSIVE: "skipped",
}
"""Element of a test case by its verdict; none where it passed."""
NO_XML = re.compile(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold, escaped or not, such as the colours of a server's log."""


def document(rows: Sequence[CaseReport]) -> str:
    """One suite per session, one test case per metric of a workload, its numbers as properties.

    A control passes where it has an accepted verdict.
    """
    root = Xml.Element("testsuites", name="specgate bench")
    for session, group in groupby(rows, key=lambda row: row.session.id):
        _suite(root, session, list(group))
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(root: Xml.Element, session: str, rows: Sequence[CaseReport]) -> None:
    suite = Xml.SubElement(root, "testsuite", name=f"bench.{session}", tests=str(len(rows)))
    suite.set("timestamp", rows[0].session.started)
    outcomes = [_case(suite, row) for row in rows]
    for name, count in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(outcomes.count(count)))


def _case(suite: Xml.Element, row: CaseReport) -> str | None:
    case = Xml.SubElement(suite, "testcase", classname=suite.get("name", ""), name=row.case)
    case.set("time", f"{row.seconds:.3f}")
    properties = Xml.SubElement(case, "properties")
    for name, value in row.numbers.items():
        Xml.SubElement(properties, "property", name=name, value=number(value))
    outcome = ("error" if row.is_red else None) if row.is_control else ELEMENTS.get(row.verdict)
    if outcome:
        message = NO_XML.sub("\N{REPLACEMENT CHARACTER}", row.sentence)
        Xml.SubElement(case, outcome, message=message, type=str(row.verdict))
    return outcome
