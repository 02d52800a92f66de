"""A report as one HTML page: no scripts, no external resources, for light and dark screens.

In: a `Report`. Out: the text of the page. Plots are inline SVG; the style sheet colours them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from serrate.report.charts import Bar, bars, columns
from serrate.report.data import Report, StageReport, Trial, lanes_text, seconds_text
from serrate.tensor.display.describe import RaggedDim, number_text, percent

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b2430; --dim: #5b6675; --line: #dfe3e9; --code: #f2f4f7;
  --rows: #e07b39; --time: #3b74d6; --chosen: #1f9d61; --exists: #1f9d61; --hole: #d6453d;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #10141a; --card: #181e26; --ink: #e4e9f0; --dim: #97a3b3; --line: #2b3440; --code: #12171e;
    --rows: #f0924f; --time: #6d9ff0; --chosen: #3cc585; --exists: #3cc585; --hole: #f26a62;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 20px; margin: 36px 0 4px; }
h3 { font-size: 13px; margin: 0 0 10px; color: var(--dim); font-weight: 600; }
p { margin: 4px 0 0; } .dim { color: var(--dim); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; margin-top: 14px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 14px; }
.pair .card { min-width: 0; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; font-weight: 400; }
th { color: var(--dim); } tr:last-child td, tr:last-child th { border-bottom: 0; }
tr.chosen td:first-child { font-weight: 600; color: var(--chosen); }
code, pre { font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
pre { margin: 0; padding: 12px 14px; overflow-x: auto; }
pre { background: var(--code); border: 1px solid var(--line); border-radius: 8px; }
.scroll { overflow-x: auto; } .scroll svg { display: block; }
.facts { display: flex; flex-wrap: wrap; gap: 6px 26px; margin-bottom: 12px; }
.facts div { min-width: 74px; } .facts b { display: block; font-size: 18px; font-weight: 600; }
.facts span { color: var(--dim); font-size: 12.5px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-top: 8px; color: var(--dim); font-size: 13px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
svg.chart { width: 100%; height: auto; display: block; }
svg.chart text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--ink); }
svg.chart text.dim { fill: var(--dim); font-size: 11px; } svg.chart text.strong { font-weight: 600; }
svg.chart .axis { stroke: var(--line); }
.rows { fill: var(--rows); } .time { fill: var(--time); } .best { fill: var(--chosen); }
.exists { fill: var(--exists); } .hole { fill: var(--hole); }
summary { cursor: pointer; color: var(--dim); margin-bottom: 10px; }
"""


def page(report: Report) -> str:
    """The page of a report."""
    title = escape(f"{report.name} on {report.device}")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>",
        f'<h1>{escape(report.name)}</h1><p class="dim">{escape(_summary(report))}</p>',
        *_rows(report),
    ]
    for stage in report.stages:
        parts += _stage(stage)
    if report.ignored:
        parts.append(_card("Without effect", _list(report.ignored)))
    return "\n".join([*parts, "</main></body></html>\n"])


def _summary(report: Report) -> str:
    count = len(report.stages)
    return f"{count} program{'' if count == 1 else 's'} on {report.device}; written by serrate's explain"


def _rows(report: Report) -> Iterator[str]:
    for each in report.rows:
        for dim in each.dims:
            yield _card(f"Rows of {each.name}, {dim.name}", _facts(dim) + _histogram(dim))


def _facts(dim: RaggedDim) -> str:
    facts = {
        "rows": f"{dim.rows:,}",
        dim.holds: f"{dim.total:,}",
        "empty rows": f"{dim.empty_rows:,}",
        "mean length": number_text(dim.mean_length),
        "median": number_text(dim.median_length),
        "95% are at most": f"{dim.p95_length:,}",
        "longest": f"{dim.max_length:,}",
        "variance": number_text(dim.variance),
        "holes if padded": percent(1 - dim.sparsity),
    }
    shown = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in facts.items())
    looks = f"looks {dim.distribution}: {dim.reason}" if dim.distribution else dim.reason
    return f'<div class="facts">{shown}</div><p class="dim">{escape(looks)}</p>'


def _histogram(dim: RaggedDim) -> str:
    return columns(f"lengths of {dim.name}", dim.histogram) if dim.histogram else ""


def _stage(stage: StageReport) -> Iterator[str]:
    yield f"<h2>{escape(stage.name)}: {escape(stage.strategy)} on {escape(stage.backend)}</h2>"
    yield f'<p class="dim">because {escape(stage.why)}</p>'
    charts = [card for card in (_times(stage.trials), _lanes(stage.trials)) if card]
    if charts:
        yield f'<div class="pair">{"".join(charts)}</div>'
    yield _card("Candidates", _table(("plan", "time", "what is known"), map(_trial_row, stage.trials), _classes(stage.trials)))
    yield _card("Plan", f"<pre>{escape(chr(10).join(stage.plan))}</pre>" + _list(stage.reasons))
    if stage.tiles:
        rows = [(t.loop, f"{t.size:,}", t.why) for t in stage.tiles]
        yield _card("Tiles", _table(("loop", "size", "because"), rows))
    guards = [
        _card(title, _table(("condition", "because"), [(bound.what, bound.reason) for bound in found], code=True))
        for title, found in (("Guards kept", stage.kept), ("Guards proven away", stage.proven))
        if found
    ]
    if guards:
        yield f'<div class="pair">{"".join(guards)}</div>'
    if stage.drawing:
        yield _card("Domains", f'<div class="scroll">{stage.drawing}</div>')
    source = f"<details open><summary>{len(stage.source.splitlines())} lines</summary><pre>{escape(stage.source)}</pre></details>"
    yield _card("Source", source)


def _times(trials: Sequence[Trial]) -> str:
    """The time of every candidate that was timed, the fastest first."""
    timed = sorted((t.seconds, t.name, t.chosen) for t in trials if t.seconds is not None)
    if not timed:
        return ""
    rows = [Bar(name, ((s, "best" if chosen else "time"),), seconds_text(s), chosen) for s, name, chosen in timed]
    return _card("Time per candidate", bars("time per candidate", rows) + _legend({"best": "chosen", "time": "others"}))


def _lanes(trials: Sequence[Trial]) -> str:
    """The lanes of every strategy."""
    rows = []
    for trial in trials:
        if trial.lanes is not None:
            found = trial.lanes
            parts = (float(found.existing), "exists"), (float(found.visited - found.existing), "hole")
            rows.append(Bar(trial.strategy, parts, f"{percent(found.waste)} wasted", trial.chosen))
    if not rows:
        return ""
    names = {"exists": "lanes with an element", "hole": "wasted: holes"}
    return _card("Lanes per strategy", bars("lanes per strategy", rows) + _legend(names))


def _trial_row(trial: Trial) -> tuple[str, str, str]:
    facts = [trial.reason, "" if trial.lanes is None else lanes_text(trial.lanes)]
    time = "" if trial.seconds is None else seconds_text(trial.seconds)
    return trial.name + (" (chosen)" if trial.chosen else ""), time, "; ".join(filter(None, facts))


def _classes(trials: Sequence[Trial]) -> list[str]:
    return ["chosen" if trial.chosen else "" for trial in trials]


def _legend(names: dict[str, str]) -> str:
    variables = {"best": "chosen", "exists": "exists", "hole": "hole", "time": "time"}
    entries = (f'<span><i style="background:var(--{variables[kind]})"></i>{escape(text)}</span>' for kind, text in names.items())
    return f'<div class="legend">{"".join(entries)}</div>'


def _card(title: str, content: str) -> str:
    return f'<section class="card"><h3>{escape(title)}</h3>{content}</section>'


def _list(lines: Iterable[str]) -> str:
    found = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{found}</ul>" if found else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], classes: Sequence[str] = (), *, code: bool = False) -> str:
    lines = [f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>"]
    for k, row in enumerate(rows):
        kind = f' class="{classes[k]}"' if k < len(classes) and classes[k] else ""
        cells = [escape(cell) for cell in row]
        if code:
            cells[0] = f"<code>{cells[0]}</code>"
        lines.append(f"<tr{kind}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'
