"""`UnlearnTask`: what the YAML files of ``eval_tasks`` cannot say of an lm-eval task themselves.

Standard errors of means over rows of which some do not apply; what ``--apply_chat_template`` does.
Only lm-eval imports this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from axolotl_unlearn.evaluation.tasks import (
    forget_cell,
    mean_of_present,
    standard_error,
    warn_once,
)

#: Aggregations that are means of rows (or 1 minus them): lm-eval knows standard errors of its own.
MEANS = (mean_of_present, forget_cell)


def command_line_metadata() -> dict[str, Any]:
    """``--metadata`` and the model's arguments: lm-eval 0.4.11 gives them to YAML tasks, not to
    tasks that are a class; the TaskManager that is loading us has them."""
    frame = inspect.currentframe()
    while frame is not None:
        manager = frame.f_locals.get("self")
        if type(manager).__name__ == "TaskManager":
            return dict(getattr(manager, "metadata", None) or {})
        frame = frame.f_back
    return {}


class UnlearnTask(ConfigurableTask):
    """A task of a YAML file with ``class: !function utils.UnlearnTask``.

    Its key ``chat_template`` says what ``--apply_chat_template`` does: "turn" (default): the prompt
    is one user turn, and the answer follows the template without the space that separates it from a
    plain prompt; "ignored": texts are scored as they stand. Either is logged once.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        config = dict(config or {})
        config.pop("class", None)
        self.plain = config.pop("chat_template", "turn") == "ignored"
        config["metadata"] = {**(config.get("metadata") or {}), **command_line_metadata()}
        super().__init__(config=config)

    def fewshot_context(
        self,
        doc: dict,
        num_fewshot: int,
        system_instruction: str | None = None,
        apply_chat_template: bool = False,
        fewshot_as_multiturn: bool = False,
        chat_template: Any = None,
        gen_prefix: str | None = None,
    ) -> str | list[str]:
        if apply_chat_template:
            what = (
                "its texts are scored as they stand, without the template"
                if self.plain
                else "each prompt is one user turn and the answer follows it without a space"
            )
            warn_once(f"--apply_chat_template, {self.config.task}: {what}.")
        return super().fewshot_context(
            doc,
            num_fewshot,
            system_instruction=system_instruction,
            apply_chat_template=apply_chat_template and not self.plain,
            fewshot_as_multiturn=fewshot_as_multiturn,
            chat_template=None if self.plain else chat_template,
            gen_prefix=gen_prefix,
        )

    def construct_requests(self, doc: dict, ctx: str, **kwargs: Any) -> list[Instance] | Instance:
        chat = kwargs.get("apply_chat_template", False) and not self.plain
        made = super().construct_requests(doc, ctx, **kwargs)
        for one in made if isinstance(made, list) else [made]:
            if chat and one.request_type == "loglikelihood":
                context, answer = one.arguments
                one.arguments = (context, answer.removeprefix(" "))
        return made

    def process_results(self, doc: dict, results: Any) -> dict[str, Any]:
        # lm-eval puts what a metric NAME_stderr gives into its own column of standard errors.
        row = super().process_results(doc, results)
        return with_errors(row, self.aggregation())

    def aggregation(self) -> dict[str, Any]:
        return with_error_functions(super().aggregation())


def with_errors(row: dict[str, Any], functions: Mapping[str, Any]) -> dict[str, Any]:
    """A document's scores, those of means once more for their standard errors."""
    return row | {f"{n}_stderr": v for n, v in row.items() if f"{n}_stderr" in functions}


def with_error_functions(functions: dict[str, Any]) -> dict[str, Any]:
    means = [name for name, function in functions.items() if function in MEANS]
    return functions | {f"{name}_stderr": standard_error for name in means}
