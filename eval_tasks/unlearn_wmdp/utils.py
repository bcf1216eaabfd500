"""WMDP (arXiv 2403.03218) from a folder: lm-eval's own tasks, their prompts and their accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.utils import load_yaml_config

from axolotl_unlearn.data.documents import require_text, require_texts
from axolotl_unlearn.data.records import SUFFIXES, read_rows
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.lm_tasks import UnlearnTask, command_line_metadata, dataset


def documents(part: str, data_dir: str, **_: Any) -> dict[str, Any]:
    """Questions of "bio", "chem" or "cyber": rows with ``question``, four ``choices``, ``answer``
    (0 to 3), in a file named as on the hub, or as in the authors' archive.

    Raises:
        UnlearnError: No such file, or a row that is no question.
    """
    folder, names = Path(data_dir), (f"wmdp-{part}", f"wmdp_{part}", f"{part}_questions", part)
    files = [folder / f"{name}{suffix}" for name in names for suffix in SUFFIXES]
    files += sorted((folder / f"wmdp-{part}").glob("test*.parquet"))
    path = next((path for path in files if path.is_file()), None)
    if path is None:
        raise UnlearnError(
            f"{folder} holds neither wmdp-{part}.jsonl (.json, .parquet) nor wmdp-{part}/"
            "test*.parquet; `data_dir` of --metadata must hold WMDP's questions.",
            code="tasks.no-file",
        )
    rows = []
    for place, row in read_rows(path):
        where = f"{path}, {place}"
        choices, answer = require_texts(row, "choices", where), row.get("answer")
        if len(choices) != 4:
            raise UnlearnError(
                f"{where}: field 'choices' has {len(choices)} texts, not 4.",
                code="tasks.bad-question",
            )
        if type(answer) is not int or not 0 <= answer < 4:
            raise UnlearnError(
                f"{where}: field 'answer' must be the number of a choice, 0 to 3.",
                code="tasks.bad-question",
            )
        question = require_text(row, "question", where)
        rows.append({"question": question, "choices": choices, "answer": answer})
    return dataset(rows)


class Wmdp(UnlearnTask):
    """lm-eval's task of a part; with ``data_dir`` of ``--metadata`` its rows come from there."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        given = dict(config or {})
        part = given.pop("part")
        file = Path(lm_eval.__file__).parent / f"tasks/wmdp/wmdp_{part}.yaml"
        own = load_yaml_config(file, mode="full")
        options = {**(given.get("metadata") or {}), **command_line_metadata()}
        # Down to chance is good, below it is none: no direction.
        metrics = [{**metric, "higher_is_better": None} for metric in own["metric_list"]]
        if options.get("data_dir"):
            own |= {"dataset_path": "", "custom_dataset": partial(documents, part)}
            del own["dataset_name"]
        super().__init__(config={**own, **given, "metric_list": metrics})
