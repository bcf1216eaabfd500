"""The HTML page: as text, and as a real headless browser shows it.

The browser tests use Chromium when it is installed (`chromium`, `chromium-browser`, `google-chrome`
or the path in CHROMIUM) and are skipped with that reason otherwise.
"""

import copy
import io
import json
import re
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import HOSTILE, chromium, hostile, needs_chromium, title_in_browser
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from report_fixture import SECRET, make_results
from rich.console import Console
from verdict_fixture import BLIND, entry, put_back
from verdict_fixture import results as verdict_results

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.audit import audits
from axolotl_unlearn.metrics.membership import blind_sentence
from axolotl_unlearn.metrics.results import load_results
from axolotl_unlearn.report import table, write_report
from axolotl_unlearn.report.page import AUDITED, attack_title

PLOTS = {"auc", "plane"}


def everything(tmp_path, **changes):
    """A page with every section that results, logs and extras can fill."""
    return write_report(
        changes.pop("results", make_results()),
        tmp_path / "sub" / "report.html",
        extras={"audit": changes.pop("audit", [])},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The page of all models."""
    return everything(tmp_path_factory.mktemp("page"))


class Table(HTMLParser):
    """Cells of the score table: {model: {metric: text}}."""

    def __init__(self):
        super().__init__()
        self.rows, self.model, self.metric, self.classes = {}, None, None, {}

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "tr" and "data-model" in attrs:
            self.model = attrs["data-model"]
            self.classes[self.model] = attrs.get("class", "").strip()
        if tag in ("td", "small", "th"):
            self.metric = attrs.get("data-metric") if tag == "td" else None

    def handle_data(self, data):
        if self.model and self.metric:
            self.rows.setdefault(self.model, {}).setdefault(self.metric, data)


def test_the_table_shows_the_results(whole):
    results = make_results()
    parser, page = Table(), whole.read_text()
    parser.feed(page)
    for model in results["models"]:
        for metric in ("aggregate", "task_aggregate", "mia_auc", "mia_score", "utility"):
            assert parser.rows[model["name"]][metric] == f"{model[metric]:.2f}"
    assert parser.classes == {
        "original": "",
        "over": "",
        "under": "",
        "merged": "best",
        "retrained": "",
        "ascent": "bad",
    }
    assert all(name in page for name in ("Forget, task 1 answers", "Task Aggregate"))
    assert "forget_task1" not in page


def test_the_answer_comes_first(whole, tmp_path):
    """Which model to use and why; without a good one, what speaks against each; what was left out
    of the candidates is never proposed."""
    page = whole.read_text()
    assert page.index("Use merged: ") < page.index("<nav") < page.index('id="scores"')
    results = make_results(("original", "over", "under", "retrained"))
    page = write_report(results, tmp_path / "r.html").read_text()
    said = re.search(r'<p class="say">(.*?)</p>', page)[1]
    assert said == "None of these is good: over (over-forgets), under (under-forgets)."
    assert page.count('class="why">') == 4 and "not gone" in page.split('class="why">')[2]
    page = write_report(make_results(("original", "retrained")), tmp_path / "r.html").read_text()
    assert "There is nothing to choose" in page


#: A line of the audit of which nothing is known.
LINE = dict.fromkeys((*AUDITED, "q", "told", "before", "retrained")) | {"rows": []}


def make_audit(name):
    """Two documents that can be told, the worse first, and one that cannot."""
    known = LINE | {"model": name, "told": True, "reading": "still known"}
    return [
        {**known, "document": "a", "loss": 0.5, "p": 0.0001, "q": 0.0003, "before": {"loss": 0.1}},
        {**known, "document": "b", "loss": 0.2, "p": 0.001, "q": 0.0015, "retrained": {"loss": 3}},
        {**known, "document": "c", "loss": 9.0, "told": False, "reading": "not told", "q": None},
    ]


def audit_with_text():
    row = {"prompt": SECRET, "expected": "the third stone & tells <nobody>.", "generated": "no"}
    first, *rest = make_audit("merged")
    return [first | {"rows": [row]}, *rest]


def test_the_audit_list_is_made_of_the_results(tmp_path):
    """Worst first; a table for each candidate. The file beside it gives texts, and no reading."""
    original, retrained = (entry(role=role, name=role) for role in ("original", "retrained"))
    known = put_back(entry(name="known"), original, 2, np.random.default_rng(0))
    made = verdict_results(original, retrained, known, entry(name="other"))
    worst = audits(load_results(made).models)["known"][0]
    row = {"id": worst["rows"][0]["id"], "prompt": "asked", "expected": "a", "generated": "spoken"}
    lines = [
        {"model": "known", "document": worst["document"], "reading": "not told", "rows": [row]},
        {"model": "known", "document": "invented", "reading": "recited", "told": True, "rows": 7},
    ]
    (tmp_path / "audit.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "results.json").write_text(json.dumps(made))
    assert run(tmp_path).exit_code == 0
    page = (tmp_path / "report.html").read_text()
    _, table, second = page.split('<div class="audit">')
    assert "<h3>known: " in table and "<h3>other: " in second and "invented" not in page
    first = table[table.index("<tbody") : table.index("spoken")]
    assert worst["reading"] == "recited" and "recited" in table and "not told" not in first


def test_a_table_of_the_audit(tmp_path):
    page = everything(tmp_path, audit=[*make_audit("merged"), *make_audit("over")]).read_text()
    _, table, second = page.split('<div class="audit">')
    assert "<h3>merged: 3 documents, 2 still known, 1 not told</h3>" in table
    assert "<h3>over" in second
    assert re.findall(r'<th scope="row">(\w)<', table) == ["a", "b", "c"]
    assert "0.10 before" in table and "3.00 retrained" in table and "&lt; 0.001" in table


def test_the_heading_of_the_audit_hides_no_reading(tmp_path):
    """ "0 of 2 documents can be told" stood over recited ones, and over what nobody measured."""
    named = LINE | {"model": "merged", "rows": [{"id": "r"}]}
    lines = [named | {"document": name, "reading": reading}
             for name, reading in (("a", "recited"), ("b", "not measured"))]  # fmt: skip
    page = everything(tmp_path, audit=lines).read_text()
    assert "<h3>merged: 2 documents, 1 recited, 1 not measured</h3>" in page
    assert "<small>1 row</small>" in page


def test_an_attack_that_the_verdict_does_not_count_is_marked(tmp_path):
    """Of other weights or data: it stood on the page as if it were of this model."""
    made = make_results()
    merged = next(model for model in made["models"] if model["name"] == "merged")
    merged["weights"] = "sha256:new"
    gain = {"recalled": {"value": 0.9, "low": 0.8, "high": 1.0, "p": 1e-9}}
    rows = [{"variant": name, "n": 9, "gain": gain} for name in ("as is", "int8")]
    attack = {"attack": "quantise", "title": "Quantising", "model": "merged", "rows": rows}
    (tmp_path / "results.json").write_text(json.dumps(made))
    for weights, marked in (("sha256:old", True), ("sha256:new", False)):
        (tmp_path / "quantise-merged.json").write_text(json.dumps(attack | {"weights": weights}))
        assert run(tmp_path).exit_code == 0
        page = (tmp_path / "report.html").read_text()
        assert "<b>quantise on merged</b>: Quantising (int8) brings back +0.90" in page
        mark = "<b>merged</b>: not counted: Quantising is of other weights."
        assert (mark in page) == marked == ("Use merged" in page)


def test_the_learned_attack_stands_beside_the_others(tmp_path):
    results = make_results()
    for model in results["models"]:
        del model["learned"]
        model["membership"] = {"attacks": {"loss": {"auc": 0.5, "interval": [0.4, 0.6]}}}
    results["models"][1]["learned"] = {"auc": 0.97, "p": 0.0002, "against": "retrained"}
    page = write_report(results, tmp_path / "r.html").read_text()
    row = page[page.index("Learned attack") :].partition("</tr>")[0]
    assert (
        "0.97" in row and "p &lt; 0.001" in row and row.count("n/a") == len(results["models"]) - 1
    )


DROP = object()


def places(data, path=()):
    """Every path into nested dicts and lists."""
    found = [path] if path else []
    items = data.items() if isinstance(data, dict) else ()
    items = enumerate(data[:3]) if isinstance(data, list) else items
    for key, value in items:
        found += places(value, (*path, key))
    return found


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**6),
            st.sampled_from(
                [DROP, None, float("nan"), float("inf"), [], {}, "x", -1, True, [None]]
            ),
        ),
        max_size=10,
    )
)
def test_no_results_break_page_or_table(changes):
    """Missing parts, NaN, empty lists, other types, anywhere: a sentence or a page."""
    results = make_results(("original", "merged", "retrained"))
    results["models"][1]["membership"] = {
        "attacks": {"loss": {"auc": 0.5, "interval": [0.4, 0.6]}},
        "blind": {"length": {"auc": 0.5, "low": 0.4, "high": 0.6, "separates": False}},
        "tpr": {"0.01": {"value": 0.1, "interval": [0.0, 0.2]}},  # of an older version
        "meaningful": False,
        "sentence": "no",
    }
    results["models"][1]["distance"] = {"utility": {"value": 0.1, "interval": [0, 1], "p": 0.01}}
    for number, junk in changes:
        paths = places(results)
        *way, last = paths[number % len(paths)]
        inner = results
        for key in way:
            inner = inner[key]
        if junk is DROP:
            del inner[last]
        else:
            inner[last] = copy.deepcopy(junk)
    with tempfile.TemporaryDirectory() as folder:
        try:
            extras = {"audit": make_audit("merged")}
            page = write_report(results, Path(folder) / "r.html", extras=extras).read_text()
            Console(file=io.StringIO(), width=80).print(table(results))
        except UnlearnError:
            return
    assert not re.search(r'="[^"]*\b(nan|inf)\b', page)


def test_collapsed_models_are_flagged_wherever_they_are_named(whole):
    page = whole.read_text()
    # verdict and cells
    assert '<span class="badge bad">collapsed</span>' in page
    assert page.count('<span class="badge bad">broken</span>') == 1
    assert page.count('class="badge good">good</span>') == 1


def test_nothing_is_fetched_and_the_page_is_small(whole):
    page = whole.read_text()
    assert not re.search(r"https?:|//[a-z]|<script|@import|url\(", page)
    links = set(re.findall(r'(?<!xlink:)(?:src|href)="([^"]*)"', page))
    anchors = {link for link in links if link.startswith("#")}
    assert links - anchors == {"data:,"}
    # The table of contents names every section, and only those that are there.
    sections = set(re.findall(r'<section id="([a-z-]+)"', page))
    assert {anchor[1:] for anchor in anchors} == sections - {"answer"} and len(anchors) >= 4
    assert whole.stat().st_size < 2_000_000


def test_every_plot_has_alt_text_and_finite_coordinates(whole):
    page = whole.read_text()
    plots = re.findall(r'<svg data-plot="([a-z]+)" role="img" aria-label="([^"]{20,})"', page)
    assert {name for name, _ in plots} == PLOTS
    assert len(plots) == page.count("<svg")
    assert not re.search(r'="[^"]*\b(nan|inf)\b', page)


def test_texts_appear_only_when_the_audit_carries_them(whole, tmp_path):
    assert SECRET not in whole.read_text()
    written = everything(tmp_path, audit=audit_with_text())
    page = written.read_text()
    assert page.count(SECRET) == 1 and written.stat().st_mode & 0o777 == 0o600
    assert "&lt;nobody&gt;" in page and "<nobody>" not in page


def test_names_from_outside_cannot_write_markup(tmp_path):
    results = make_results(("original", "over"))
    results["models"][1]["name"] = '<img src=x onerror="alert(1)">'
    results["data_dir"] = "<script>alert(2)</script>"
    page = write_report(results, tmp_path / "r.html").read_text()
    assert "<img" not in page and "<script" not in page


def test_a_page_from_the_least_there_can_be(tmp_path):
    """Headline scores only: no plot that lacks its data, and no error."""
    least = {"schema": 2, "models": [{"name": "m", "aggregate": 0.5}]}
    page = write_report(least, tmp_path / "r.html")
    text = page.read_text()
    assert "<svg" not in text and "0.50" in text


def test_missing_cells_are_said_and_not_drawn_as_zero(tmp_path):
    results = make_results(("original", "merged"))
    for model in results["models"]:
        model["cells"]["retain_task3_knowledge"] = None
        model["intervals"] = {}
    results["notes"] = ["no rows for task 3"]
    page = write_report(results, tmp_path / "r.html").read_text()
    assert page.count("11 of 12 cells") == 2 and "<li>no rows for task 3</li>" in page
    assert "Task Aggregate over fewer than 12 cells" in page


@pytest.mark.parametrize("shift", [True, False])
def test_blind_baselines_stand_beside_membership(tmp_path, shift):
    ends = {"low": 0.7, "high": 0.9} if shift else {"low": 0.4, "high": 0.9}
    blind = {name: {"auc": 0.81, "separates": shift, **ends} for name in BLIND}
    warning = blind_sentence(blind)
    lab = {"attacks": {"zlib": {"auc": 0.57, "interval": [0.5, 0.6]}}, "blind": blind}
    results = make_results(("original", "merged"))
    results["models"][1]["membership"] = lab | {"meaningful": not shift, "sentence": warning}
    page = write_report(results, tmp_path / "r.html").read_text()
    assert page.count("membership figure means nothing") == (2 if shift else 0)
    assert ('<span class="badge bad">separates</span>' in page) == shift
    assert "<td>0.57<small>" in page and page.count("<td>0.81<small>") == len(BLIND)
    assert "Blind: Compressed size" in page  # it was called a loss, of which there is none
    assert all(f"Blind: {attack_title(f'blind_{name}')}" in page for name in BLIND)


def run(*arguments):
    from axolotl_unlearn.cli import unlearn

    return CliRunner().invoke(unlearn, ["report", *map(str, arguments)])


def test_command_prints_table_and_path(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(make_results(("original", "merged"))))
    outcome = run(tmp_path)
    assert outcome.exit_code == 0, outcome.output
    assert str(tmp_path / "report.html") in outcome.output.replace("\n", "")
    assert "merged" in outcome.output and (tmp_path / "report.html").is_file()


def test_names_from_outside_cannot_write_on_the_terminal(tmp_path):
    """Marks that clear it, and lines of a name's own, went there as they stood."""
    results = make_results(("original", "over", "merged"))
    results["models"][1]["name"] = "o\x1b[2J\nUse it: good"
    (tmp_path / "results.json").write_text(json.dumps(results))
    said = run(tmp_path).output
    assert "Use it" in said and "\x1b" not in said and "\nUse it" not in said


def test_attack_files_are_found_and_their_sentences_shown(tmp_path):
    """Written by the attack's own `figures_row` and `save`: 30 of 40 rows recalled after 10 steps,
    10 before, so the gain is .5. The terminal counts it as the page does; it did not."""
    from axolotl_unlearn.attacks.probes import Scores
    from axolotl_unlearn.attacks.results import figures_row, save

    ids = [f"row{i}" for i in range(40)]

    def scores(recalled):
        return Scores(ids=ids, documents=ids, recalled=recalled, probability=recalled)

    before, after = scores([1.0, 0, 0, 0] * 10), scores([1.0, 1, 1, 0] * 10)
    rows = [figures_row("0 steps", before, before), figures_row("10 steps", after, before)]
    result = {"attack": "relearn", "title": "Relearning", "model": "merged", "rows": rows}
    save(tmp_path / "a", result)
    folder = tmp_path / "eval"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(make_results(("original", "merged"))))
    outcome = run(folder, "--attacks", tmp_path / "a")
    assert outcome.exit_code == 0, outcome.output
    page = (folder / "report.html").read_text()
    assert "relearn on merged" in page and "+0.50" in page
    assert "brings back" in page
    assert "merged is not good" in outcome.output and "brings back" in outcome.output
    assert "brings back" not in run(folder).output
    # Of the folder's own files none is left out for another folder's.
    save(tmp_path / "mild", result | {"rows": [rows[0], figures_row("10 steps", before, before)]})
    save(folder, result)
    assert "brings back" in run(folder, "--attacks", tmp_path / "mild").output
    (folder / "relearn-merged.json").unlink()
    # A file without p is not whole.
    path = tmp_path / "a" / "relearn-merged.json"
    path.write_text(re.sub(r',\s*"p": [^\s,}]+', "", path.read_text()))
    said = " ".join(run(folder, "--attacks", tmp_path / "a").output.split())
    assert "the file of Relearning is not whole" in said
    path.write_text(json.dumps({"attack": "relearn", "rows": [{"gain": 1}]}))
    assert run(folder, "--attacks", tmp_path / "a").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{folder}"], "axolotl-unlearn eval"),
        (["{folder}/broken", "--attacks", "{folder}"], "no attack's file there"),
        (["{folder}/schema"], "schema 1"),
    ],
)
def test_bad_input_ends_with_a_sentence(tmp_path, arguments, sentence):
    for name, schema in (("broken", 2), ("schema", 1)):
        (tmp_path / name).mkdir()
        results = {**make_results(("original",)), "schema": schema}
        (tmp_path / name / "results.json").write_text(json.dumps(results))
    outcome = run(*(a.format(folder=tmp_path) for a in arguments))
    assert outcome.exit_code == 2
    assert "Error: " in outcome.output and sentence in outcome.output.replace("\n", " ")


# ---------------------------------------------------------------- a real browser

# Looks at each chart as laid out: drawn at all, text inside it, readable, names apart.
PROBE = """
const found = [];
const doc = frame.contentDocument;
for (const svg of doc.querySelectorAll("svg[data-plot]")) {
  const name = svg.dataset.plot, box = svg.getBoundingClientRect();
  const shapes = [...svg.querySelectorAll("rect,polyline,circle,path,line")]
    .filter(s => { const b = s.getBoundingClientRect(); return b.width + b.height > 0; });
  if (box.width < 200 || box.height < 100) found.push(name + " is too small");
  if (shapes.length < 5) found.push(name + " is hardly drawn");
  const names = [];
  for (const text of svg.querySelectorAll("text")) {
    const b = text.getBoundingClientRect(), label = name + " '" + text.textContent + "'";
    if (b.left < box.left - 2 || b.right > box.right + 2 || b.top < box.top - 2 ||
        b.bottom > box.bottom + 2) found.push(label + " leaves its chart");
    const size = parseFloat(frame.contentWindow.getComputedStyle(text).fontSize);
    if (size * box.width / svg.viewBox.baseVal.width < 9.5) found.push(label + " is too small");
    names.push([b, label]);
  }
  for (const [a, x] of names) for (const [b, y] of names) if (x < y) {
    const w = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const h = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (w > 1 && h > 3) found.push(x + " overlaps " + y);
  }
}
const wide = doc.documentElement.scrollWidth - frame.clientWidth;
if (wide > 0) found.push("the page is " + wide + " px wider than the screen");
const scores = doc.querySelector(".scores").closest(".scroll");
const hidden = scores.scrollWidth - scores.clientWidth;
if (hidden > 0) found.push(hidden + " px of the scores are cut");
document.body.innerHTML = "<pre>" + JSON.stringify(
  {found, plots: [...doc.querySelectorAll("svg[data-plot]")].map(s => s.dataset.plot)}) + "</pre>";
"""


def probed(tmp_path, page, width):
    """What `PROBE` finds of a page in a frame so wide."""
    wrapper = tmp_path / "frame.html"
    wrapper.write_text(
        f'<body><iframe id="frame" style="border:0;width:{width}px;height:2000px"></iframe><script>'
        f"frame.onload = () => {{ {PROBE} }}; frame.srcdoc = {json.dumps(page)};</script></body>"
    )
    size = f"--window-size={width + 100},2000"
    done = chromium(tmp_path, size, "--virtual-time-budget=5000", "--dump-dom", wrapper.as_uri())
    return json.loads(re.search(r"<pre>(\{.*\})</pre>", done.stdout, re.S)[1])


@needs_chromium
@pytest.mark.parametrize(("width", "long"), [(390, False), (390, True), (768, True), (1280, False)])
def test_browser_draws_every_plot_inside_its_frame(tmp_path, width, long):
    """The page in a frame as wide as a phone, a tablet, a desktop."""
    results = make_results()
    if long:
        results["models"][1]["name"] = "npo-over-beta-0.03-with-a-very-long-name"
        results["models"][2]["name"] = "npo-under-0.1"
    page = everything(tmp_path, results=results).read_text()
    outcome = probed(tmp_path, page, width)
    assert outcome["found"] == []
    assert set(outcome["plots"]) == PLOTS


@needs_chromium
def test_browser_runs_nothing_that_results_hold(tmp_path):
    """Every name and text of results, audit, attacks and configs tries to run a script, in
    turn in each way of `HOSTILE`; the page's own policy, which would stop it, is taken out."""
    audit = [
        line | {"document": text, "rows": [dict.fromkeys(("id", "prompt", "expected"), text)]}
        for line, text in zip(make_audit("merged"), HOSTILE, strict=False)
    ]
    for line in audit:
        line["rows"][0]["generated"] = line["document"]
    results = hostile(make_results(), keep=("role",))
    # Half a surrogate is refused at the door of the results; the extras keep it.
    results = json.loads(json.dumps(results).replace("\\ud800", ""))
    names = [model["name"] for model in results["models"]]
    page = write_report(
        results | {"notes": HOSTILE[:-1], "created": HOSTILE[0], "warning": HOSTILE[1]},
        tmp_path / "report.html",
        extras={
            "attack_sentences": dict.fromkeys(HOSTILE, HOSTILE[2]),
            "audit": [line | {"model": names[3]} for line in audit],
        },
    )
    text = page.read_text()
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", text) and "[U+202E]" in text
    assert title_in_browser(tmp_path, text) == "Unlearning report"


@needs_chromium
def test_browser_would_run_it(tmp_path):
    """The check above can fail: as they are, all six scripts run in one of three places."""
    places = '<div><style>a{}%s</style></div><p>%s</p><b title="%s">b</b>'
    page = "".join(places % (text, text, text) for text in HOSTILE if "title" in text)
    ran: set[str] = set()
    for _ in range(5):  # `autofocus` waits for a frame, which a busy machine may not draw in time
        ran |= set(re.findall(r"ran (\d)", title_in_browser(tmp_path, f"<title>P</title>{page}")))
        if len(ran) == 6:
            break
    assert ran == set("012345")
