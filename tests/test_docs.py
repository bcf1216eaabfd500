"""What the documents name exists: paths, commands, config blocks, objectives, presets."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.config import parse_unlearn
from axolotl_unlearn.config.presets import preset_names
from axolotl_unlearn.metrics import results
from axolotl_unlearn.metrics.membership import ATTACKS
from axolotl_unlearn.metrics.semeval import CELLS
from axolotl_unlearn.metrics.verdict import PARTS, STATUSES, Verdict
from axolotl_unlearn.objectives import OBJECTIVES
from eval_tasks.tofu import utils as tofu
from research import tables

ROOT = Path(__file__).parents[1]
PAGES = list(tables.PAGES)
#: Folders whose files the repository holds (out/, data/ and the like are made or the user's).
OURS = r"(?:axolotl_unlearn|docs|eval_tasks|examples|mergekit_configs|research|tests)"
WRITTEN = (".j2", ".py", ".md", ".yml", ".yaml")


def text(page: Path) -> str:
    return page.read_text("utf-8")


def data(name: str) -> dict:
    return json.loads(text(ROOT / "research" / f"{name}.json"))


def says(page: str, *sentences: str) -> None:
    """A page of docs/ has each of them, wherever its lines end."""
    said = " ".join(text(ROOT / "docs" / page).split())
    assert [one for one in sentences if one not in said] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_paths_exist(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text(page))
    missing = [link for link in links if not (page.parent / link).exists()]
    named = re.findall(rf"(?<![\w/.-]){OURS}/[\w./*-]*\w", text(page))
    missing += [name for name in named if not list(ROOT.glob(name))]
    assert not missing


def test_commands_are_written_without_the_one_that_prints_a_logo():
    """`axolotl unlearn ...` works too; pages, help and messages name `axolotl-unlearn ...`."""
    files = [ROOT / "README.md"]
    for folder in ("axolotl_unlearn", "docs", "eval_tasks", "examples", "mergekit_configs"):
        files += [path for path in (ROOT / folder).rglob("*.*") if path.suffix in WRITTEN]
    assert [str(path.relative_to(ROOT)) for path in files if "axolotl unlearn" in text(path)] == []


def test_every_page_is_in_the_menu_of_the_site():
    """mkdocs builds one that is not, and no reader of the menu finds it."""
    menu = re.findall(r": (\S+\.md)$", text(ROOT / "mkdocs.yml"), re.M)
    assert sorted(menu) == sorted(["index.md", *(p.name for p in (ROOT / "docs").glob("*.md"))])


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text(page), flags=re.S), re.M)
    plain = (re.sub(r"[^\w\- ]", "", head.lower()) for head in heads)
    return {head.strip().replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_sections_that_links_name_exist(page):
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", text(page))
    wrong = [
        f"{link}#{anchor}"
        for link, anchor in links
        if anchor not in anchors(page.parent / link if link else page)
    ]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_and_their_options_exist(page):
    """Every --option of an `axolotl-unlearn` command line, in a block or a sentence."""
    joined = text(page).replace("\\\n", " ")
    lines = re.findall(r"axolotl[ -]unlearn ([a-z][a-z-]+)([^`\n]*)", joined)
    unknown = [name for name, _ in lines if name not in unlearn.list_commands(None)]
    for name, rest in lines:
        command = unlearn.get_command(None, name)
        words = rest.partition("#")[0].partition("&&")[0].split()
        if isinstance(command, click.Group):
            command = command.commands.get(words[0]) if words else None
        if command is None or command.context_settings.get("ignore_unknown_options"):
            continue
        known = {option for p in command.params for option in (*p.opts, *p.secondary_opts)}
        given = {word.partition("=")[0].strip("(),.;") for word in words if word.startswith("--")}
        unknown += [f"{name} {option}" for option in sorted(given - known - {"--help"})]
    assert not unknown


def test_pages_are_equal_to_their_data():
    """`make docs-tables` would change nothing."""
    changed = [page.name for page in PAGES if tables.filled(text(page)) != text(page)]
    assert not changed


def test_figures_in_sentences_are_those_of_their_files():
    people, unchanged = data("benchmarks/people"), data("benchmarks/unchanged")
    every, precision = people["recall"]["all"], people["precision"]
    taken, offered, missed = (100 * every[k] for k in ("taken", "offered", "missed"))
    says(
        "deleting-data.md",
        f"Of {every['rows']} rows that name one of {people['people']} people of "
        f"{len(people['languages'])} languages",
        f"{taken:.1f} % are taken, {offered:.1f} % offered, {missed:.1f} % missed.",
        f"the rest {100 * precision['weak']['right']:.1f} %",
        f"at most {100 * max(unchanged['worst'].values()):.1f} % of draws",
        "at least 99.9 % names the person",
    )
    assert min(precision[kind]["right"] for kind in ("taken", "likely")) >= 0.999


@pytest.mark.parametrize("name", ["tutorial", "verdict"])
def test_readings_that_a_page_shows_are_given_today(name):
    shown = re.findall(r"^ \w+(?: +(?:n/a|\d\.\d+)){5} (.+)$", text(ROOT / f"docs/{name}.md"), re.M)
    assert len(shown) >= 3 and {*shown} <= {*STATUSES, *PARTS.values()}


def test_what_is_said_of_match_is_in_its_files():
    lasting, device = (data(f"results/{one}")["tables"] for one in ("lasting", "lasting-device"))
    worlds = [lasting["relearned-411"], device["relearned-lume-forget"]]
    worlds.append(device["relearned-tofu-forget"])

    def most(model: str, place: str) -> list[str]:
        rows = [next(r for r in world["rows"] if model in r[0]) for world in worlds]
        return [f"{max(float(re.search(place, x)[1]) for x in row[1:]):.2f}" for row in rows]

    ends, (npo, merged) = (
        most("match", r", \+?(-?[\d.]+)\]"),
        (most(name, r"\(\+?(-?[\d.]+)") for name in ("npo", "merged")),
    )
    kept = {row[0]: row[2].lstrip("+") for row in lasting["scored-411"]["rows"]}
    members = {n: {row[0]: row for row in device[f"members-{n}"]["rows"]} for n in ("tofu", "lume")}
    loss = [
        f"{m['*match-preset*'][1].split()[0]} ({{}}{m['*retrained*'][1]})" for m in members.values()
    ]
    equal = [sum("equal" in x for x in m["*match-preset*"]) for m in members.values()]
    assert equal == [0, 1]
    says(
        "never-seen.md",
        "at most {} (tiny), {} (LUME) and {} (TOFU) more".format(*ends),
        "up to {} more (tiny), {} (LUME) and {} (TOFU)".format(*npo),
        "merge {}, {} and {}.".format(*merged),
        f"{kept['*match_short*']} nats (tiny)",
        f"authors with AUC {loss[0].format('retrained: ')}, LUME's documents with "
        f"{loss[1].format('')}",
    )


def test_how_far_the_estimate_of_memory_is_from_the_peak():
    rows = data("results/memory")["tables"]["methods"]["rows"]
    parts = sorted(row[3] for row in rows)
    allocated = f"{parts[0]} to {parts[-1]} of what {len(rows)} methods and settings allocated"
    says("performance.md", allocated)


def test_what_is_said_of_speed_is_in_its_files():
    names = ("results-gpu", "results-gpu-5008086", "results-gpu-3cbba2d", "recipe-gpu")
    gpu, four_bit, evaluated, recipe = (data(f"benchmarks/{name}") for name in names)
    seconds = evaluated["evaluation"]
    says(
        "performance.md",
        f"100 held-out rows takes {gpu['match']['look_seconds']:.1f} s",
        f"A 4-bit base needs {four_bit['ours_qlora']['peak_gb']:.1f} GB",
        f"takes {seconds['loss_seconds']:.1f} s for the facts of every token and "
        f"{seconds['generation_seconds']:.1f} s",
        f"takes {recipe['seconds_of_training'] / 60:.1f} minutes with {recipe['peak_gib']:.0f} GiB",
        f"takes {recipe['commands']['merge_lora_seconds'] / 60:.1f} minutes on an H200",
    )
    assert recipe["tests"]["passed"] and recipe["tests"]["failed"]
    many = [json.loads(line) for line in text(ROOT / "research/benchmarks/load.jsonl").splitlines()]
    (most,) = (one for one in many if one.get("rows") == 1_000_000)
    says(
        "reliability.md",
        f"{most['check_seconds']:.0f} s of processor in `check`, {most['encode_seconds']:.0f} s to "
        f"encode and {most['encode_mb']} MB",
    )


def test_what_made_a_figure_can_be_run():
    """A command of a module that is history names its commit."""
    for path in [*ROOT.glob("research/results/*.json"), *ROOT.glob("research/benchmarks/*.json")]:
        found = re.search(r'"command": "[^"]*-m (research[\w.]*)([^"]*)"', text(path))
        module = found and ROOT / found[1].replace(".", "/")
        there = module is None or module.is_dir() or module.with_suffix(".py").is_file()
        assert there or re.search(r"\(of [0-9a-f]{7}\)", found[2]), path


def test_a_module_that_a_page_runs_is_there():
    """Or its line names the commit that had it."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("research/**/*.md")]
    pages.append(ROOT / "Makefile")
    lines = [(page, line) for page in pages for line in text(page).splitlines()]
    for page, line in lines:
        for name in re.findall(
            r"python -m (research[\w.]*\w)\b(?! [^`]*\(of [0-9a-f]{7,8}\))", line
        ):
            place = ROOT / name.replace(".", "/")
            assert place.is_dir() or place.with_suffix(".py").is_file(), (page, name)


def test_a_changed_number_is_found():
    page = text(ROOT / "docs" / "results.md")
    at = re.search(r"0\.\d{3}", page)
    assert tables.filled(page[: at.start()] + "9.999" + page[at.end() :]) == page


@pytest.mark.parametrize("name", ["README.md", "docs/results.md"])
def test_numbers_of_results_come_from_data_alone(name):
    """Outside what `research/tables.py` writes there is no decimal but identifiers and versions."""
    page = tables.TABLE.sub("", text(ROOT / name))
    page = tables.CELL.sub("", page)
    page = re.sub(r"```.*?```|\]\([^)]*\)|arXiv [\d.]+", "", page, flags=re.S)
    page = re.sub(r"(Axolotl|mergekit|lm-eval|Python|Apache)[ -][\d.]+", "", page)
    assert re.findall(r"\d*\.\d{2,}", page) == []


@pytest.mark.parametrize("name", ["README.md", "docs/results.md"])
def test_tables_are_narrow(name):
    lines = [line for line in text(ROOT / name).splitlines() if line.startswith("| ---")]
    assert lines and max(line.count("---") for line in lines) <= 7


def test_readme_is_short():
    assert len(text(ROOT / "README.md").splitlines()) <= 90
    assert len(text(ROOT / "README.md").split()) <= 540


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", text(ROOT / "Makefile"), re.M))
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", text(page), re.M))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_config_blocks_are_valid(page):
    for block in re.findall(r"```yaml\n(.*?)```", text(page), re.S):
        content = yaml.safe_load(block)
        if isinstance(content, dict) and "unlearn" in content:
            parse_unlearn(content["unlearn"])


def test_figures_that_the_page_of_metrics_names_are_there():
    """`membership.auc`, `ideal`: no file had them. A figure is a field of results.json or of a
    verdict, a score of membership, or what a task of lm-eval gives."""
    lm_eval = re.findall(
        r"metric: (?:forget_|retain_)?([\w.]+)",
        "".join(text(path) for path in ROOT.glob("eval_tasks/**/*.yaml")),
    )
    known = {*lm_eval, *ATTACKS, *CELLS, *tofu.MEASURES["forget"]}
    known |= {f"Verdict.{one.name}" for one in dataclasses.fields(Verdict)}
    fields = results.Model.model_fields
    known |= {*fields, *(f"membership.{name}" for name in results.Membership.model_fields)}
    page = text(ROOT / "docs" / "metrics.md")
    cells = "".join(re.findall(r"^\| (`.*?) \|", page, re.M))
    named = [one.replace("{side}", "forget").replace("{n}", "1").removeprefix("{set}_")
             for one in re.findall(r"`(.+?)`", cells)]  # fmt: skip
    assert len(named) > 20 and [one for one in named if one not in known] == []
    parts = [one for one in vars(results).values() if isinstance(one, type)]
    known = {name for one in parts for name in getattr(one, "model_fields", ())}
    prose = re.findall(r"`([a-z_]+)`", page.partition("## Collapse")[2])
    assert len(prose) > 8 and [one for one in prose if one not in known] == []


def test_every_objective_and_preset_is_documented():
    page = text(ROOT / "docs" / "objectives.md")
    assert all(f"| `{name}` |" in page for name in OBJECTIVES)
    assert all(name.removesuffix("-model2") in page for name in preset_names())


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yml")), ids=str)
def test_example_blocks_are_valid(path):
    cfg = yaml.safe_load(text(path))
    if cfg.get("unlearn"):
        parse_unlearn(cfg["unlearn"])


def test_what_runs_where_names_its_tests():
    """Each cell: "by reading", or a word and the test that shows it."""
    page = text(ROOT / "docs" / "reliability.md")
    table = page.partition("## What runs where")[2].partition("\n*tested*")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == [
        *("one process", "DDP", "FSDP2", "ZeRO-2", "ZeRO-3", "Ray")
    ]
    for cell in (cell for row in rows[1:] for cell in row[1:] if cell != "by reading"):
        word = re.fullmatch(r'\[([\w ]+)\]\(\.\./(\S+) "(\w+)"\)', cell)[1]
        assert word in ("tested", "loss and gradient tested", "refused")
    named = re.findall(r'\]\(\.\./(\S+\.py) "(\w+)"\)', page)
    assert len(named) > 20 and all(f"def {test}(" in text(ROOT / file) for file, test in named)


def test_tests_that_a_page_names_are_there():
    files = [*ROOT.glob("tests/*.py"), *ROOT.glob("research/tests/*.py")]
    known = {"test_datasets", *(path.stem for path in files)}
    known.update(*(re.findall(r"def (test_\w+)\(", text(path)) for path in files))
    named = {(page.name, one) for page in PAGES for one in re.findall(r"`(test_\w+)`", text(page))}
    assert {(page, one) for page, one in named if one not in known} == set()


def test_no_path_of_one_machine_in_tracked_files():
    done = subprocess.run(
        ["git", "grep", "-nIE", r"(^|[^A-Za-z0-9_.])/(work|farm|root|home)/", "--", "."],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode > 1:
        pytest.skip("not a git checkout")
    assert [x for x in done.stdout.splitlines() if not x.startswith("tests/test_docs.py")] == []


def test_generated_pages_are_those_of_the_code():
    """`make docs-tables` would change nothing."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for name, page in generate.PAGES.items():
        assert text(ROOT / "docs" / name) == page().rstrip() + "\n", name
