"""Copy tasks into a checkout of lm-evaluation-harness and run that project's own checks on them.

    python eval_tasks/upstream.py path/to/lm-evaluation-harness
    python eval_tasks/upstream.py                # its source package from the index
    python eval_tasks/upstream.py --data tofu=data/tofu muse=data/muse      # where there is no hub

Checks: the hooks of its .pre-commit-config.yaml that look at task folders (ruff with its settings,
check-yaml, end-of-file-fixer, trailing-whitespace; installed from the index in the pinned
versions), the headings of its README template, `lm_eval validate`, and tests/test_tasks.py on each
task, with the data of ``--data`` or of the hub. What cannot run is skipped and says why. Exit code
1 if a check failed.

The tasks still import axolotl_unlearn: a pull request would carry evaluation/lm_tasks.py and the
metrics that they use into the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
TASKS = ("tofu", "muse")
#: Which tasks its tests load; the source package has tests/test_tasks.py and lacks this file.
NEW_TASKS = """\
import re
from pathlib import Path


def new_tasks():
    changed = Path(".github/outputs/tasks_all_changed_and_modified_files.txt").read_text().split()
    return [re.search(r"^task: (.*)$", Path(f).read_text(), re.M)[1] for f in changed]
"""
#: Of templates/new_yaml_task/README.md, for a checkout without it.
HEADINGS = ("Paper", "Citation", "Groups, Tags, and Tasks", "Checklist", "Changelog")
Result = tuple[str, str, str]


def run(words: Sequence[str | Path], folder: Path, path: Sequence[Path] = ()) -> tuple[int, str]:
    """Exit code and output of a command, with ``path`` before all other Python modules."""
    known = [*map(str, path), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, known)),
        "PYTEST_ADDOPTS": "",  # of whoever calls us
    }
    done = subprocess.run(
        [*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True
    )
    return done.returncode, (done.stdout + done.stderr).strip()


def from_index(folder: Path) -> Path:
    """The source package of the installed version."""
    wanted = f"lm_eval=={version('lm_eval')}"
    options = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-q", "-d", folder)
    code, said = run([sys.executable, "-m", "pip", "download", wanted, *options], folder)
    archives = sorted(folder.glob("lm_eval-*.tar.gz"))
    if code or not archives:
        sys.exit(
            f"{wanted} cannot be had from the index ({said.splitlines()[-1:]}); name a checkout."
        )
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return archives[0].with_name(archives[0].name.removesuffix(".tar.gz"))


def copy(checkout: Path, names: Sequence[str]) -> list[Path]:
    """The task folders below lm_eval/tasks; their tasks are named as changed to its tests."""
    tasks = checkout / "lm_eval" / "tasks"
    if not tasks.is_dir():
        sys.exit(f"{tasks} does not exist; name the root of a checkout of lm-evaluation-harness.")
    folders = []
    for name in names:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(HERE / name, tasks / name, dirs_exist_ok=True, ignore=ignored)
        folders.append(tasks / name)
    changed = checkout / ".github" / "outputs" / "tasks_all_changed_and_modified_files.txt"
    changed.parent.mkdir(parents=True, exist_ok=True)
    files = [file for folder in folders for file in sorted(folder.glob("*.yaml"))]
    single = [f for f in files if re.search(r"^task: \S", f.read_text("utf-8"), re.M)]  # no groups
    changed.write_text("".join(f"{f.relative_to(checkout)}\n" for f in single), "utf-8")
    return folders


def lint(checkout: Path, folders: Sequence[Path], tools: Path) -> Iterator[Result]:
    """Its hooks, in its versions where the index has them."""
    settings = checkout / ".pre-commit-config.yaml"
    text = settings.read_text("utf-8") if settings.is_file() else ""
    pins = {
        tool: re.search(rf"{repo}\s+rev: v([\d.]+)", text)
        for tool, repo in (("ruff", "ruff-pre-commit"), ("pre-commit-hooks", "pre-commit-hooks"))
    }
    wanted = [f"{tool}=={pin[1]}" if pin else tool for tool, pin in pins.items()]
    code, _ = run([sys.executable, "-m", "pip", "install", "-q", "--target", tools, *wanted], HERE)
    path = [] if code else [tools]
    files = [file for folder in folders for file in sorted(folder.iterdir()) if file.is_file()]
    yaml = [file for file in files if file.suffix == ".yaml"]
    hooks = {
        "ruff check": ["ruff", "check", *folders],
        "ruff format": ["ruff", "format", "--check", *folders],
        "check-yaml": ["pre_commit_hooks.check_yaml", "--unsafe", *yaml],
        "end-of-file-fixer": ["pre_commit_hooks.end_of_file_fixer", *files],
        "trailing-whitespace": [
            *("pre_commit_hooks.trailing_whitespace_fixer", "--markdown-linebreak-ext=md"),
            *files,
        ],
    }
    for name, words in hooks.items():
        code, said = run([sys.executable, "-m", *words], checkout, path)
        if "No module named" in said:
            yield name, "skipped", f"{', '.join(wanted)} cannot be installed from the index"
        else:
            yield name, "failed" if code else "ok", said if code else ""


def readme(checkout: Path, folders: Sequence[Path]) -> Iterator[Result]:
    """All headings of its template for new tasks."""
    template = checkout / "templates" / "new_yaml_task" / "README.md"
    found = (
        re.findall(r"^### (.*)$", template.read_text("utf-8"), re.M) if template.is_file() else []
    )
    for folder in folders:
        text = (folder / "README.md").read_text("utf-8")
        missing = [h for h in found or HEADINGS if f"### {h}" not in text]
        yield f"README of {folder.name}", "failed" if missing else "ok", ", ".join(missing)


def reachable(address: str = "https://huggingface.co") -> bool:
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return False
    try:
        with urllib.request.urlopen(address, timeout=10):
            return True
    except OSError:
        return False


def validate(checkout: Path, folders: Sequence[Path]) -> Iterator[Result]:
    """`lm_eval validate`."""
    names = ",".join(folder.name for folder in folders)
    words = [sys.executable, "-m", "lm_eval", "validate", "--tasks", names]
    code, said = run(words, checkout, [checkout, HERE.parent])
    yield "lm_eval validate", "failed" if code else "ok", said if code else ""


def tests(checkout: Path, folders: Sequence[Path], data: Mapping[str, Path]) -> Iterator[Result]:
    """Its tests of changed tasks."""
    name, known = "tests/test_tasks.py", checkout / "tests" / "utils.py"
    if not (checkout / name).is_file():
        yield name, "skipped", "the checkout lacks it"
        return
    if not known.is_file():
        known.write_text(NEW_TASKS, "utf-8")
        (known.parent / "__init__.py").touch()
    lacking = [folder.name for folder in folders if folder.name not in data]
    if lacking and not reachable():
        yield (
            name,
            "skipped",
            f"the hub cannot be reached; `--data {lacking[0]}=FOLDER` has the data",
        )
        return
    for folder in folders:
        for file in folder.glob("*.yaml") if folder.name in data else ():
            settings = re.sub(r"^metadata:\n(  .*\n)*", "", file.read_text("utf-8"), flags=re.M)
            given = json.dumps({"data_dir": str(data[folder.name].resolve()), "version": 1.0})
            file.write_text(f"{settings}metadata: {given}\n", "utf-8")
    words = [sys.executable, "-m", "pytest", "-q", name, "-k", "TestNewTasksElseDefault"]
    code, said = run(words, checkout, [checkout, HERE.parent])
    counts = [line for line in said.splitlines() if " passed" in line]  # noise may follow it
    yield name, "failed" if code else "ok", said if code else counts[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", nargs="?", type=Path, help="[its source package]")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--data", nargs="+", default=[], metavar="TASK=FOLDER")
    given = parser.parse_args(arguments)
    data = {task: Path(folder) for task, _, folder in (one.partition("=") for one in given.data)}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        checkout = given.checkout.resolve() if given.checkout else from_index(work)
        folders = copy(checkout, given.tasks)
        for check in (lint(checkout, folders, work / "tools"), readme(checkout, folders),
                      validate(checkout, folders), tests(checkout, folders, data)):  # fmt: skip
            for name, state, why in check:
                print(f"{state:8}{name}{why and ': '}{why}", flush=True)
                failed += state == "failed"
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
