"""What unlearning makes of Axolotl's own options: `axolotl_options.yml`; all others are Axolotl's.

After an upgrade ``python -m axolotl_unlearn.checks.axolotl_options OLD`` prints the options that
the installed Axolotl has and the one in the folder ``OLD`` (``site-packages/axolotl``) has not.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import re
import sys
from collections.abc import Collection, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from axolotl_unlearn.config import nearest
from axolotl_unlearn.data.records import short

TABLE = yaml.safe_load((resources.files(__package__) / "axolotl_options.yml").read_text("utf-8"))
#: What is looked into before Axolotl checks it.
_SHAPES = {
    str: "base_model base_model_config lora_model_dir adapter output_dir dataset_prepared_path "
    "lr_scheduler optimizer tokenizer_config",
    dict: "lr_scheduler_kwargs gradient_checkpointing_kwargs overrides_of_model_config "
    "chat_template_kwargs",
    (int, float): "num_epochs max_steps micro_batch_size gradient_accumulation_steps batch_size "
    "sequence_len eval_sequence_len min_sample_len val_set_size save_steps eval_steps "
    "saves_per_epoch evals_per_epoch lora_r warmup_steps seed",
    list: "plugins unfrozen_parameters peft_layers_to_transform",
}
#: Numbers that change nothing, or end in a traceback, at 0.
_ABOVE_ZERO = """
    learning_rate num_epochs max_steps micro_batch_size gradient_accumulation_steps batch_size
    eval_batch_size logging_steps lora_r lora_alpha sequence_len save_total_limit
""".split()


def refused(cfg: dict[str, Any], rows: bool = False) -> Iterator[str]:
    """A sentence for each option that is set and does not go with unlearning.

    Args:
        rows: whether rows are read by Axolotl's own types (``unlearn.data.rows``).
    """
    for group in TABLE["refused"]:
        if any({**cfg, "unlearn.data.rows": rows}.get(key) for key in group.get("unless", ())):
            continue
        values = group.get("values", {})
        for option in [*group["options"], *values]:
            value = cfg.get(option)
            size = value.get("size", 1) if isinstance(value, dict) else value
            is_small = isinstance(size, int) and size <= group.get("above", -1)
            if value and not is_small and value in values.get(option, [value]):
                cure = group.get("cure", "remove it")
                yield f"`{option}: {value}` does not go with unlearning ({group['why']}); {cure}."


def noted(cfg: dict[str, Any]) -> dict[str, str]:
    """Options that are set, and left out since they have no effect -> a sentence."""
    found = {}
    for group in TABLE["noted"]:
        at = group.get("at")
        if _is_one(cfg, group.get("beside", {})) or (at and not _is_one(cfg, at)):
            continue
        values = group.get("values", {})
        for option in [*group["options"], *values]:
            value = cfg.get(option)
            if value in values[option] if option in values else value:
                found[option] = f"`{option}: {value}` has no effect: {group['why']}."
    return found


def _is_one(cfg: dict[str, Any], wanted: dict[str, list[Any]]) -> bool:
    """Whether an option has one of its values, or where there are none is set."""
    return any(cfg.get(key) in some if some else cfg.get(key) for key, some in wanted.items())


def absent(cfg: dict[str, Any]) -> Iterator[str]:
    """Packages that an option needs and that are not installed; found after loading else."""
    for key, needs in TABLE["needs"].items():
        value = cfg.get(key)
        if not value:
            continue
        by_value = needs.items() if isinstance(needs, dict) else [(".*", needs)]
        for pattern, module in by_value:
            if re.fullmatch(pattern, str(value)) and importlib.util.find_spec(module) is None:
                yield (
                    f"`{key}: {short(value)[1:-1]}` needs the package {module}, which is not "
                    "installed; install it or change the key."
                )


@cache
def known(axolotl: Path | None = None) -> set[str]:
    """Options of the Axolotl in a folder (the installed one), as its source has them: it takes
    seconds to import. None where there is none."""
    if axolotl is None:
        spec = importlib.util.find_spec("axolotl")
        axolotl = Path(spec.submodule_search_locations[0]) if spec else Path("nowhere")
    classes: dict[str, tuple[str, str]] = {}  # name -> bases, body
    plugins = [*axolotl.glob("integrations/*_parallel/args.py")]  # which 0.21 always loads
    for path in [*axolotl.glob("utils/schemas/*.py"), *plugins]:
        for part in re.split(r"^(?=class )", path.read_text("utf-8"), flags=re.M):
            if head := re.match(r"class (\w+)(?:\(([^)]*)\))?:", part):
                classes[head[1]] = (head[2] or "", part)
    found: set[str] = set()
    left = ["AxolotlInputConfig", *(name for name in classes if name.endswith("ParallelArgs"))]
    while left:
        bases, body = classes.pop(left.pop(), ("", ""))
        found |= {*re.findall(r"^    ([a-z]\w*)\s*:", body, flags=re.M)}
        found |= {*re.findall(r"\balias=\"(\w+)\"", body)}
        left += re.findall(r"\w+", bases)
    return found


#: Keys that take a name -> classes of such names, as ``package/file class``, and single ones.
_NAMES = {
    "optimizer": ("transformers/training_args.py OptimizerNames",
                  "axolotl/utils/schemas/enums.py CustomSupportedOptimizers"),
    "lr_scheduler": ("transformers/trainer_utils.py SchedulerType", "one_cycle", "rex"),
}  # fmt: skip


@cache
def _named(place: str) -> tuple[str, ...]:
    file, _, name = place.partition(" ")
    if not name:
        return (place,)
    spec = importlib.util.find_spec(file.partition("/")[0])
    path = Path(spec.submodule_search_locations[0] if spec else "nowhere").parent / file
    text = path.read_text("utf-8") if path.is_file() else ""
    body = re.search(rf"^class {name}\b.*?(?=^\S|\Z)", text.replace("\n\n", "\n"), re.M | re.S)
    return tuple(re.findall(r'^    \w+ = "(\w+)"', body[0], re.M)) if body else ()


def name_faults(cfg: dict[str, Any]) -> Iterator[str]:
    """A name that is no optimizer or schedule, and a pattern that is none; transformers and PEFT
    find them when the weights are loaded. A release that has its names elsewhere refuses none."""
    for key, places in _NAMES.items():
        found, name = [*map(_named, places)], cfg.get(key)
        names = [one for some in found for one in some]
        if name and all(found) and name not in names:
            near = nearest(name, names) or f"; there are {', '.join(sorted(names))}"
            yield f"`{key}: {name}` is no {key}{near}."
    given = cfg.get("optim_args")
    if isinstance(given, dict):  # Axolotl's own optimizers take it as it is
        own = cfg.get("optimizer") in _named(_NAMES["optimizer"][1])
        given = "" if own else ",".join(f"{key}={value}" for key, value in given.items())
    if given and not all(part.count("=") == 1 for part in str(given).split(",")):
        yield (
            f"`optim_args: {cfg['optim_args']}` cannot be read: it is split at each comma and `=`; "
            "give single numbers or words, such as {momentum: 0.9}."
        )
    if isinstance(pattern := cfg.get("lora_target_modules"), str):
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"`lora_target_modules: {pattern}` is no pattern ({error}); correct it."


def dropped(cfg: dict[str, Any]) -> list[str]:
    """A sentence for each key of ``optim_args`` that transformers leaves unread."""
    given, read = cfg.get("optim_args") or {}, TABLE["optim_args"].get(cfg.get("optimizer"))
    keys = given if isinstance(given, dict) else re.findall(r"(\w+) *=", str(given))
    return [
        f"`optim_args`: {cfg['optimizer']} does not read {key!r}, but {', '.join(read)}."
        for key in keys
        if read and key not in read
    ]


def ignored(cfg: dict[str, Any]) -> list[str]:
    """Keys that Axolotl leaves unread without a word; those of other plugins are among them."""
    options = {*known(), "unlearn"}
    given = [str(key) for key, value in cfg.items() if value is not None]
    return [key for key in given if key not in options] if len(options) > 1 else []


def misplaced(cfg: dict[str, Any], ours: Collection[str]) -> Iterator[str]:
    """A sentence for each ignored key that was meant as an option, or for our block (``ours``)."""
    # Other plugins' keys are like Axolotl's own (`lm_eval_batch_size`).
    cutoff = 0.8 if len(cfg.get("plugins") or []) < 2 else 0.95
    for key in ignored(cfg):
        # A text, slow to compare; or a place for YAML anchors, as `x-datasets`.
        if len(key) > 40 or key.startswith(("x-", "_", ".")):
            continue
        near = difflib.get_close_matches(key, [*known(), "unlearn"], n=1, cutoff=cutoff)
        if key in ours:
            yield f"`{key}` would be ignored, it belongs into the block `unlearn:`; move it."
        elif near:
            yield f"`{key}` is no option and would be ignored; did you mean `{near[0]}`?"


def number_faults(cfg: dict[str, Any]) -> Iterator[str]:
    """A sentence for each number that no run can mean; Axolotl says the rest itself."""
    for key, value in cfg.items():
        given = value
        if key in (*_ABOVE_ZERO, "warmup_ratio") and isinstance(value, str):
            try:
                given = float(value)
            except ValueError:
                yield f"`{key}: {short(value)[1:-1]}` is no number; correct it."
        if isinstance(given, bool) or not isinstance(given, (int, float)) or key == "local_rank":
            continue
        if not 0 <= given < math.inf or (key in _ABOVE_ZERO and given == 0):
            yield f"`{key}: {value}` must be {'above 0' if key in _ABOVE_ZERO else '0 or more'}."


def shape_faults(cfg: dict[str, Any]) -> list[str]:
    """A sentence for each key that we read and that is no list, block or text as it should be."""
    names = {str: "a text", dict: "a block of keys", list: "a list", (int, float): "a number"}
    faults = [
        f"`{key}: {short(cfg[key])[1:-1]}` must be {names[kind]}; correct it."
        for kind, keys in _SHAPES.items()
        for key in keys.split()
        if cfg.get(key) is not None and not isinstance(cfg[key], kind)
    ]
    plugins = cfg.get("plugins")
    if isinstance(plugins, list) and not all(isinstance(name, str) for name in plugins):
        faults.append("`plugins` must be a list of names; correct it.")
    return faults


if __name__ == "__main__":
    print(*sorted(known() - known(Path(sys.argv[1]))), sep="\n")
