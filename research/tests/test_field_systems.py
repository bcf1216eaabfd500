"""G-effect, red team, FROC's choice, grafts and the judge: by hand, then as commands."""

from __future__ import annotations

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from attack_models import make_lab
from click.testing import CliRunner
from conftest import tiny_llama
from torch.testing import assert_close

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.objectives import OBJECTIVES
from research.__main__ import research
from research.analysis import froc
from research.merging import graft
from research.probes import gradient_effect, judge, red_team
from research.probes.red_team import METRICS
from research.studies import path_dependence


def run(*words) -> str:
    outcome = CliRunner().invoke(research, list(map(str, words)))
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


ROWS = [([3, 4, 5, 6, 7], [-100, -100, 5, 6, 7]), ([8, 9, 10], [-100, 9, 10])]
KEPT = [([11, 12, 13], [-100, 12, 13])]


def test_g_effect_is_what_a_small_step_does():
    """e is minus the slope of R along -grad L: ascent on one row lowers the other side's NLL by
    eta * e; of ascent on R itself e is minus the squared norm; 2 sigmoid(0) = 1, so NPO at its
    reference is ascent on the row's sum."""
    model = tiny_llama().double()
    known = OBJECTIVES
    found = gradient_effect.effects(model, model, [known["ga"], known["npo"]], ROWS, KEPT)
    step = gradient_effect.gradients(model, ROWS, known["ga"], None, 8)
    own = gradient_effect.gradients(model, ROWS, None, None, 8)
    norm = sum(float((g**2).sum()) for g in own.values())
    assert found["ga"]["all"]["forget"] == pytest.approx(-norm)
    blocks = [row["retain"] for name, row in found["ga"].items() if name != "all"]
    assert sum(blocks) == pytest.approx(found["ga"]["all"]["retain"])
    assert {"embedding", "shallow", "head"} <= set(found["ga"])

    def retained() -> float:
        ids, labels = (torch.tensor([one]) for one in KEPT[0])
        with torch.no_grad():
            return float(model(input_ids=ids, labels=labels).loss)

    before, eta = retained(), 1e-3
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight -= eta * step[name]
    assert (before - retained()) / eta == pytest.approx(found["ga"]["all"]["retain"], rel=0.05)
    assert found["npo"]["all"]["forget"] < found["ga"]["all"]["forget"] < 0
    with pytest.raises(UnlearnError, match="more than label"):
        gradient_effect.effects(model, model, [known["kl"]], ROWS, KEPT)


def test_correlations_by_hand():
    """Before 0, 1, 2; after 0, 2, 4: r = 1; after 4, 2, 0: -1; after 1, 1, 1: none."""
    after = {"up": [0, 2, 4], "down": [4, 2, 0], "flat": [1, 1, 1]}
    models = {
        str(i): {"before": dict.fromkeys(METRICS, float(i))}
        | {name: dict.fromkeys(METRICS, float(some[i])) for name, some in after.items()}
        for i in range(3)
    }
    found = red_team.correlations(models)
    assert [found[name]["loss"] for name in after] == [pytest.approx(1), pytest.approx(-1), None]
    with pytest.raises(UnlearnError, match="three"):
        red_team.correlations({"a": models["0"]})


def point(loss=1.0, accuracy=0.0, retain=(1.0, 1.0), risks=(0.0,)):
    return froc.Point(loss, accuracy, *retain, {str(i): r for i, r in enumerate(risks)})


def test_froc_by_hand():
    """Loss_U e and 1, accuracy 0 and .5: s = 1 + .5 - 0 and 0; Loss_R 1 and 2, accuracy .5 and 1:
    r = 0 + .5 and ln 2 + 0; e = (ln(1 + exp -s) + ln(1 + exp r)) / 2."""
    found = froc.scores({"a": point(math.e, 0.0, (1.0, 0.5)), "b": point(1.0, 0.5, (2.0, 1.0))})
    assert found["a"] == pytest.approx((math.log1p(math.exp(-1.5)) + math.log1p(math.exp(0.5))) / 2)
    assert found["b"] == pytest.approx((math.log(2) + math.log(3)) / 2)


def test_of_valid_configurations_the_best_retained_is_first():
    good, better = (
        point(retain=(1.0, 0.8), risks=[0] * 99),
        point(retain=(1.0, 0.9), risks=[0] * 99),
    )
    leaks = point(retain=(1.0, 1.0), risks=[0.5] * 99)
    found = froc.chosen({"leaks": leaks, "good": good, "better": better}, 0.1)
    assert list(found) == ["better", "good", "leaks"] and not found["leaks"]["valid"]
    assert froc.chosen({"leaks": leaks}, 0.1, leaks)["leaks"]["valid"]  # as the retrained one has


def test_a_graft_by_hand():
    base, tuned = (
        {"a": torch.zeros(2), "b": torch.ones(2)},
        {"a": torch.ones(2), "b": torch.ones(2)},
    )
    changes = graft.updates(base, tuned)
    assert list(changes) == ["a"]
    later = {"a": torch.full((2,), 5.0), "b": torch.zeros(2)}
    assert_close(graft.carried(later, changes)["a"], torch.full((2,), 6.0))
    assert_close(graft.carried(base, changes), tuned)
    with pytest.raises(UnlearnError, match="next base has no weight a"):
        graft.carried({"a": torch.zeros(3)}, changes)


def test_a_pack_by_hand():
    """Pruned: the larger half. diag(3, 1): rank 1 holds 9 / 10 of the energy."""
    assert_close(graft.pruned(torch.tensor([1.0, -4, 2, 3]), 0.5), torch.tensor([0.0, -4, 0, 3]))
    change = torch.diag(torch.tensor([3.0, 1.0]))
    for energy, rank in ((0.9, 1), (0.95, 2)):
        found, used = graft.low_rank(change, energy=energy)
        assert used == rank and (found[0, 0], found[1, 1]) == pytest.approx((3, rank - 1), abs=1e-5)
    torch.manual_seed(0)
    low = torch.randn(40, 2) @ torch.randn(2, 30)
    changes = {"x.self_attn.q": low, "x.mlp.up": low, "embed": low, "norm": torch.ones(4)}
    found, size = graft.packed(changes, rank=2, share=1.0)
    for name in ("x.self_attn.q", "embed", "norm"):
        assert_close(found[name], changes[name], atol=1e-4, rtol=1e-4)
    assert (found["x.mlp.up"] - low).norm() < 0.03 * low.norm()
    assert size == pytest.approx((4 * 140 + 140 + 8 * 1200 + 16) / (4 * 3604))


class Judge(BaseHTTPRequestHandler):
    """Chat completions by a rule: words that repeat are unnatural, shared words are alike."""

    asked: list[dict] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body | {"path": self.path, "key": self.headers["Authorization"]})
        text = body["messages"][0]["content"]
        answer = text.rpartition("ANSWER: ")[2].split()
        share = len(set(answer)) / max(1, len(answer))
        if "REFERENCE: " in text:
            known = text.partition("REFERENCE: ")[2].partition("\n")[0].split()
            share = 1 - len(set(answer) & set(known)) / len(set(known))
        said = json.dumps({"score": 1 + round(9 * share)}) if answer != ["?"] else "no idea"
        reply = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_judge_at_an_endpoint(endpoint):
    rows = [("Who?", "Ada of Bath", "Ada of Bath"), ("Who?", "he he he he", "Ada of Bath")]
    found = judge.judged(rows, endpoint, "tiny", "secret")
    assert found["naturalness"][0] == 1 > found["naturalness"][1]
    assert found["difference"] == [0, 1]
    last = Judge.asked[-1]
    assert last["path"] == "/v1/chat/completions" and last["temperature"] == 0
    assert last["model"] == "tiny" and last["key"] == "Bearer secret"
    with pytest.raises(UnlearnError, match="no score"):
        judge.judged([("q", "?", "r")], endpoint, "tiny")
    with pytest.raises(UnlearnError, match="gives no answer"):
        judge.ask("http://127.0.0.1:9/v1", "tiny", "text")


def test_the_judge_agrees_with_our_flags_on_made_up_cases(endpoint):
    """Loops of a word and of a phrase, a stutter; a fact, a refusal, a list; and one that only a
    judge sees: words in no order, of which none repeats."""
    broken = ["6 " * 40, "the old mill by " * 12, "a a a a b b b b a a a a b b b b a a a a"]
    sound = [
        "Ada Brook was born in Bath and moved to Cork when she was nine.",
        "I am not able to answer this question, because I do not know the person.",
        "Apples, pears, plums, quinces, cherries and a small jar of honey.",
    ]
    told = judge.judged([("Who?", text, "Ada") for text in broken + sound], endpoint, "tiny")
    assert judge.agreement(told["naturalness"], broken + sound) == 1
    assert judge.agreement([0.1], ["lamp seven under because of Tuesday green run"]) == 0


@pytest.mark.parametrize("text", ["", '{"score": 0}', '{"score": 11}', '{"score": 3.5}', "7"])
def test_what_is_no_score_is_refused(text):
    with pytest.raises(UnlearnError, match="no score"):
        judge.read_score(text)


def test_the_commands(tmp_path, endpoint):
    lab = make_lab()
    models, data = [lab.memorised, lab.unlearned, lab.control], ["--data", lab.data]
    file = tmp_path / "out.json"
    said = run("g-effect", lab.memorised, "--original", lab.memorised, *data, "--limit", 4)
    assert "npo" in said and "middle" in said
    options = ["--limit", 6, "--rows", 4, "--lr", 1e-3, "--out", file]
    run("red-team", *models, *data, *options)
    told = json.loads(file.read_text("utf-8"))
    assert set(told["pearson"]) == {"jailbreak", "noise", "int4", "relearn"}
    names = [f"{name}={path}" for name, path in zip("mc", models[::2], strict=True)]
    said = run("froc", *names, *data, "--risk", 0.5, "--retrained", lab.control, "--out", file)
    found = json.loads(file.read_text("utf-8"))
    assert found["m"]["risk"] > found["c"]["risk"] == 0 and "FROC" in said
    out = tmp_path / "next"
    words = ["--base", lab.memorised, "--unlearned", lab.unlearned, "--next", lab.memorised]
    assert "of the update's bytes" in run(
        "graft", *words, "--pack", "--energy", 0.999, "--out", out
    )
    run(
        "mrp", lab.memorised, *data, "--layers", 1, "--merge", "--steps", 2, "--out", tmp_path / "p"
    )
    run("guard-it", lab.memorised, *data, "--layer", 0, "--out", tmp_path / "g")
    assert (tmp_path / "p" / "model.safetensors").is_file()
    assert (tmp_path / "g" / "interventions.tensors").is_file()
    words = ["--endpoint", endpoint, "--judge", "tiny", "--limit", 3, "--max-new-tokens", 4]
    assert "naturalness" in run("judge", lab.memorised, *data, *words)


def test_each_stream_of_a_path_holds_every_row_of_its_side_alone(tmp_path):
    path_dependence.streams(tmp_path, 0)
    for side in ("forget", "retain"):
        rows, stream = (
            [json.loads(line)["id"] for line in (tmp_path / name).read_text("utf-8").splitlines()]
            for name in (f"{side}.jsonl", f"{side}-stream.jsonl")
        )
        assert sorted(stream) == sorted(rows * path_dependence.PASSES)
