"""One self-contained page: plots as SVG, numbers as tables, nothing fetched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ci.bench import history_plots, plots, request_plots
from ci.bench.bench_report import BenchReport
from ci.bench.case_report import CaseReport
from ci.bench.charts import Drawing
from ci.bench.history import Series
from ci.report import breakable
from harness.bench.console import change, interval
from harness.bench.wording import percent

PAGE_FOLDER = Path(__file__).parent


MOST_COLUMNS = 4


@dataclass(frozen=True)
class Figure:
    """A drawing, what it is called, and how to read it."""

    id: str
    title: str
    reading: str
    drawing: Drawing

    @property
    def columns(self) -> int:
        """Panels side by side on a wide page."""
        return min(max(len(self.drawing.panels), 1), MOST_COLUMNS)

    @property
    def drawn(self) -> list[tuple[str, Markup]]:
        """Title and SVG of every panel."""
        labelled = ((p.title, p.svg(f"{self.title}: {p.title}")) for p in self.drawing.panels)
        return [(title, Markup(svg)) for title, svg in labelled]


def page(report: BenchReport, series: Mapping[tuple[str, str], Series]) -> str:
    """The report of a run as one HTML document."""
    jinja = Environment(
        loader=FileSystemLoader([PAGE_FOLDER, PAGE_FOLDER.parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {
        "percent": percent,
        "interval": interval,
        "change": change,
        "breakable": breakable,
    }
    return jinja.get_template("page.html").render(
        report=report,
        figures=list(figures(report, series)),
        series=series,
        environments=[asdict(e) for e in dict.fromkeys(s.environment for s in report.sessions)],
    )


def figures(report: BenchReport, series: Mapping[tuple[str, str], Series]) -> Sequence[Figure]:
    """The plots that have data, in the order of the page."""
    judged = [row for row in report.judged if row.evidence.blocks]
    controls = [row for row in report.cases if row.is_control and row.evidence.blocks]
    shifted = [row for s in report.sessions for row in _shifts(report, s.id)]
    steps, facts = request_plots.halves(judged), request_plots.conditions(report.trials)
    followed = {key: one for key, one in series.items() if len(one.entries) > 1}
    spread = series if len({sku for _, sku in series}) > 1 else {}
    drawn: tuple[tuple[str, str, str, Any, Callable[[Any], Drawing]], ...] = (
        ("forest", "Change of every case", FOREST, [*judged, *controls], plots.forest),
        ("waterfall", "Which half of TPOT moved", WATERFALL, steps, request_plots.waterfall),
        ("evidence", "Evidence, block by block", EVIDENCE, judged, plots.evidence),
        ("slopes", "Blocks in the order they ran", SLOPES, judged, plots.slopes),
        (
            "machine",
            "Conditions of the machine",
            MACHINE,
            facts,
            request_plots.conditions_plot,
        ),
        ("shift", "Which requests moved", SHIFT, shifted, request_plots.shift_plot),
        ("history", "Nights", HISTORY, followed, history_plots.history),
        ("heat", "Cases on kinds of machines", HEAT, spread, history_plots.heat_map),
    )
    return [
        Figure(name, title, reading, plot(data))
        for name, title, reading, data, plot in drawn
        if data
    ]


def _shifts(report: BenchReport, session: str) -> list[dict[str, Any]]:
    rows: list[CaseReport] = [row for row in report.judged if row.session.id == session]
    return request_plots.shifts(rows[0].session, report.trials) if rows else []


FOREST = (
    "B against A, in the metric's own direction; ↑ marks metrics of which more is better. Point: "
    "estimate (Hodges–Lehmann). Line: 95 % interval that holds at every look; a pale one has no "
    "end, since fewer than six blocks bound nothing. Band: on the worse side, from δ0, up to which "
    "an effect counts as none, to δ1, which is never accepted as equivalent. Upright tick: the "
    "least slowdown that the noise of this run would have shown (MDE)."
)
WATERFALL = (
    "Step time and accept length add up to TPOT. The first is the kernels and the host, the second "
    "the drafts; a rest is the scheduler or the HTTP path."
)
EVIDENCE = (
    "E-values after every block that B is worse, not worse or better; dashed lines are the "
    "thresholds of equivalence and of rejection. One may look after every block: all looks "
    "together reach the upper line falsely with its stated probability."
)
SLOPES = "Both arms of a block are joined, in their randomised order. Pale: a dropped block."
MACHINE = (
    "Clock, temperature and load of every trial of every session. Where the arms differ, their "
    "times cannot be compared."
)
SHIFT = (
    "Change of every decile of the requests from A to B: the median over the blocks, and the range "
    "of the blocks. A level line moved everything alike; one that rises moved the slow "
    "end."
)
HISTORY = (
    "Change against the pinned reference, measured the same night, in the metric's own direction. "
    "A suspected change is a place to look; an alarm, which weighs all nights together, is "
    "confirmed."
)
HEAT = "The verdict of each case's last night on each kind of machine, and its change."
