"""Tables, verdicts and the one-page HTML report.

rich.print(table("out/eval/results.json"))
write_report("out/eval/results.json", "out/eval/report.html")
"""

from __future__ import annotations

from axolotl_unlearn.metrics.results import load_results
from axolotl_unlearn.report.answer import answer_of
from axolotl_unlearn.report.inputs import find_inputs
from axolotl_unlearn.report.page import write_report
from axolotl_unlearn.report.terminal import table

__all__ = ["answer_of", "find_inputs", "load_results", "table", "write_report"]
