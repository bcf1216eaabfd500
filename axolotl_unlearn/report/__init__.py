"""Tables, verdicts and the one-page HTML report.

rich.print(table("out/eval/results.json"))
write_report("out/eval/results.json", "out/eval/report.html")
"""

from __future__ import annotations

from axolotl_unlearn.metrics.results import load_results
from axolotl_unlearn.report.inputs import find_inputs
from axolotl_unlearn.report.page import write_report
from axolotl_unlearn.report.terminal import reasons, table, verdicts

__all__ = ["find_inputs", "load_results", "reasons", "table", "verdicts", "write_report"]
