"""`UnlearnTask`: what the YAML files of ``eval_tasks`` cannot say of an lm-eval task themselves.

Standard errors of means over rows of which some do not apply; what ``--apply_chat_template`` does.
Only lm-eval imports this module.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from axolotl_unlearn.engine.token_scoring import context_of
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.sets import EvaluationSets, load_sets
from axolotl_unlearn.metrics import semeval
from axolotl_unlearn.metrics.memorisation import TokenFacts

#: What ``--metadata`` may hold for us; the model's arguments are merged into it by lm-eval.
_OPTIONS = ("data_dir", "min_members")

logger = logging.getLogger(__name__)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning the first time only: a task says it of every row."""
    logger.warning("%s", message)


def sets_of(metadata: dict[str, Any], part: str) -> EvaluationSets:
    options = {k: metadata[k] for k in _OPTIONS if metadata.get(k) is not None}
    sets = load_sets(**options, parts=(part,))
    for note in sets.notes:
        if part != "mmlu":
            logger.warning("%s", note)
    return sets


def dataset(rows: list[dict[str, Any]]) -> dict[str, Any]:
    from datasets import Dataset

    return {"test": Dataset.from_list(rows)}


def tokenizer_of(metadata: dict[str, Any]):
    from transformers import AutoTokenizer

    name = metadata.get("tokenizer") or metadata.get("pretrained")
    if not name:
        raise UnlearnError(
            "this task counts tokens and needs the tokenizer: run with `--model_args "
            'pretrained=...`, or give it in `--metadata \'{"tokenizer": "..."}\'`.',
            code="tasks.no-tokenizer",
        )
    keys = ("revision", "subfolder", "trust_remote_code", "gguf_file")
    options = {key: metadata[key] for key in keys if metadata.get(key)}
    return AutoTokenizer.from_pretrained(str(name), **options)


def context_in(metadata: dict[str, Any]) -> int | None:
    """Tokens that the model takes, where its folder or lm-eval's arguments say so."""
    from transformers import AutoConfig

    if given := metadata.get("max_length"):
        return int(given)
    try:
        name = str(metadata.get("pretrained") or metadata.get("tokenizer"))
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return None
    return context_of(SimpleNamespace(config=config))


def first_token_splitter(
    tokenizer, limit: int | None = None
) -> Callable[[str, str], tuple[str, str, int]]:
    """A function (text, name) -> (first token's text, the rest, number of tokens in the rest); with
    a BOS before plain text ("", text, all tokens): lm-eval then scores the text after the BOS. An
    `Answer` is split after its prompt.

    Args:
        limit: Of the model; lm-eval would leave out the beginning of a longer text.
    """

    def split(text: str, name: str) -> tuple[str, str, int]:
        prompt = getattr(text, "prompt", "")
        ids = tokenizer(prompt + text)["input_ids"]
        if limit and len(ids) - 1 > limit:
            raise UnlearnError(
                f"document {name!r} has {len(ids)} tokens but the model takes {limit}; cut it.",
                code="tasks.too-long",
            )
        if len(ids) < 2:
            raise UnlearnError(
                f"document {name!r} is a single token; nothing can be predicted of it: remove it.",
                code="tasks.no-split",
            )
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not prompt and len(ids) == len(plain) + 1 and ids[1:] == plain:
            return "", text, len(plain)
        least = len(tokenizer(prompt)["input_ids"]) if prompt else 1
        for end in range(0 if prompt else 1, len(text)):
            if end and text[end - 1].isspace():  # lm-eval moves white space at the end to the rest
                continue
            first = tokenizer(prompt + text[:end])["input_ids"]
            if least <= len(first) < len(ids) and first == ids[: len(first)]:
                return prompt + text[:end], text[end:], len(ids) - len(first)
        raise UnlearnError(
            f"document {name!r} cannot be split after its first token with this tokenizer; "
            "remove it.",
            code="tasks.no-split",
        )

    return split


def facts_of(result: Any, what: str) -> TokenFacts | None:
    """The facts of each token, which `hf-unlearn` gives; None (said once) from other models."""
    facts = getattr(result, "facts", None)
    if facts is None:
        warn_once(
            f"{what} are NaN: they need the facts of each token; run `axolotl-unlearn tasks run "
            "--model hf-unlearn`."
        )
    return facts


def or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def mean_of_present(values: Sequence[float | None]) -> float:
    """Mean of the values that apply; NaN of none."""
    return or_nan(semeval.mean([value for value in values if value is not None]))


def standard_error(values: Sequence[float | None]) -> float:
    """Of the mean of the values that apply, taken as independent; NaN of fewer than two."""
    present = [value for value in values if value is not None]
    if len(present) < 2:
        return math.nan
    return statistics.stdev(present) / math.sqrt(len(present))


def forget_cell(values: Sequence[float | None]) -> float:
    """1 - mean."""
    return 1.0 - mean_of_present(values)


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

    def build_all_requests(self, *args: Any, **given: Any) -> None:
        """Anew: ``--cache_requests`` knows requests by the task's name, so that another data folder
        would get the scores of the first (lm-evaluation-harness#4123)."""
        if given.get("cache_requests"):
            warn_once("--cache_requests: the requests of tasks that read your data are made anew.")
        super().build_all_requests(*args, **given | {"cache_requests": False})

    def fewshot_context(
        self, doc: dict, num_fewshot: int, system_instruction: str | None = None,
        apply_chat_template: bool = False, fewshot_as_multiturn: bool = False,
        chat_template: Any = None, gen_prefix: str | None = None,
    ) -> str | list[str]:  # fmt: skip
        if apply_chat_template:
            what = "each prompt is one user turn and the answer follows it without a space"
            if self.plain:
                what = "its texts are scored as they stand, without the template"
                apply_chat_template, chat_template = False, None
            warn_once(f"--apply_chat_template, {self.config.task}: {what}.")
        return super().fewshot_context(
            doc, num_fewshot, system_instruction, apply_chat_template, fewshot_as_multiturn,
            chat_template, gen_prefix,
        )  # fmt: skip

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
        return with_errors(super().process_results(doc, results), self.aggregation())

    def aggregation(self) -> dict[str, Any]:
        return with_error_functions(super().aggregation())


def with_errors(row: dict[str, Any], functions: Mapping[str, Any]) -> dict[str, Any]:
    """A document's scores, those of means once more for their standard errors."""
    return row | {f"{n}_stderr": v for n, v in row.items() if f"{n}_stderr" in functions}


def with_error_functions(functions: dict[str, Any]) -> dict[str, Any]:
    means = [name for name, function in functions.items() if function in MEANS]
    return functions | {f"{name}_stderr": standard_error for name in means}
