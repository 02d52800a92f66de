"""Reports: the result of `explain`. No stage of the compiler uses any of this.

In: compiled programs and the arguments of a call. Out: a `Report`: data that prints as text and is written as a page.

| module       | what it is                                                                              |
| `data.py`    | the report as frozen records, and as text                                               |
| `collect.py` | fills it: rows, plan, reasons, guards, lanes and times of other strategies, source      |
| `page.py`    | the report as one HTML file without external resources                                  |
| `charts.py`  | its plots, as SVG                                                                       |
"""

from serrate.report.data import Bound, Report, RowSet, StageReport, Trial

__all__ = ["Bound", "Report", "RowSet", "StageReport", "Trial"]
