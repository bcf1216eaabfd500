"""Other attacks on finished seeds of `make never-seen`; against most of them nothing was trained.

    python -m research.benchmarks.other_attacks out/ns-217 out/ns-218   # > research/results/never-seen-other.json

The folders may also be those of `make never-seen-real`.

All are told which texts are members, apart from the fifth that they judge. Four are what the
recipe's objectives work against: the ridge regression of `axolotl-unlearn eval` on a text's
features (`feature_matching`), logistic probes of mean and spread of each layer's hidden states
(`hidden_matching`), and a regression on the norms of the gradient that a text gives each weight matrix
(`gradient_norm_matching`; white-box, arXiv 1812.00910). No objective looks at the rest: random forests,
which need not be linear; probes of the hidden states of the last token and of the fifth of tokens
that are least likely; the gradient norms of the loss of those tokens alone; a probe of how the loss
pulls at each layer's hidden states.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from axolotl_unlearn.data.documents import read_documents
from axolotl_unlearn.engine.token_scoring import score_texts
from axolotl_unlearn.files import write_json
from axolotl_unlearn.metrics.intervals import auc
from axolotl_unlearn.metrics.learned import text_features
from axolotl_unlearn.metrics.membership import auc_equivalence
from axolotl_unlearn.models import load_model, load_tokenizer, parse_models
from axolotl_unlearn.store import versions

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("retrained", "teacher", "match")
DIVISIONS = 3

Sides = tuple[NDArray, NDArray]


def ridge() -> Any:
    return make_pipeline(StandardScaler(), Ridge(100.0))


def forest() -> Any:
    return RandomForestClassifier(300, min_samples_leaf=3, random_state=0)


def probe() -> Any:
    """Its penalty is the strong one that a thousand features of 240 texts ask for."""
    return make_pipeline(StandardScaler(), LogisticRegression(C=1e-3, max_iter=500))


#: Title, what it sees of a text, and how it is made.
ATTACKS: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "ridge": ("ridge, token scores (`feature_matching`)", "features", ridge),
    "probe": ("probe, mean hidden states (`hidden_matching`)", "mean", probe),
    "forest": ("random forest, token scores", "features", forest),
    "forest_states": ("random forest, mean hidden states", "mean", forest),
    "last": ("probe, the last token's hidden states", "last", probe),
    "spread": ("probe, spread of the hidden states (`hidden_matching`)", "spread", probe),
    "forest_spread": ("random forest, spread of the hidden states", "spread", forest),
    "least": ("probe, hidden states of the least likely tokens", "least", probe),
    "gradient": (
        "ridge, gradient norms of all weights (`gradient_norm_matching`)",
        "gradient",
        ridge,
    ),
    "forest_gradient": ("random forest, gradient norms of all weights", "gradient", forest),
    "least_gradient": ("ridge, gradient norms of the least likely tokens", "least_gradient", ridge),
    "pull": ("probe, gradients at the hidden states", "pull", probe),
}


def out_of_fold(attack: str, members: NDArray, nonmembers: NDArray) -> Sides:
    """Scores of both sides, ``[N, F]`` and ``[M, F]`` to ``[N]`` and ``[M]``, each by an attack
    that was not told of its fifth; means over several divisions."""
    features = np.concatenate([members, nonmembers])
    member = np.repeat([1, 0], [len(members), len(nonmembers)])
    make = ATTACKS[attack][2]
    how = "predict" if make is ridge else "predict_proba"
    folds = [StratifiedKFold(5, shuffle=True, random_state=i) for i in range(DIVISIONS)]
    scores = [cross_val_predict(make(), features, member, cv=cv, method=how) for cv in folds]
    mean = np.mean(scores, 0)
    mean = mean[:, 1] if mean.ndim == 2 else mean
    return mean[member == 1], mean[member == 0]


def text_states(model: Any, tokenizer: Any, texts: list[str]) -> dict[str, NDArray]:
    """What is inside the model at each text.

    Returns:
        Hidden states after each layer, ``[N, layers * hidden]``: mean and standard deviation over
        the text's tokens, those of its last token, mean over its least likely tokens; norms over
        the tokens of the loss's gradient by them; and ``[N, W]`` logarithms of the norm of the
        gradient by each of W parameters, of the whole loss and of that of the least likely tokens.
    """
    found: dict[str, list[NDArray]] = defaultdict(list)
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        output = model(input_ids=ids, output_hidden_states=True)
        logp = output.logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        layers = output.hidden_states[1:]
        least = logp.detach().argsort()[: max(1, len(logp) // 5)]
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        pulls = torch.autograd.grad(-logp.mean(), [*layers, *weights], retain_graph=True)
        at_least = torch.autograd.grad(-logp[least].mean(), weights)
        states = torch.cat([layer[0].detach() for layer in layers], -1).float().numpy()
        found["mean"].append(states.mean(0))
        found["spread"].append(states.std(0))
        found["last"].append(states[-1])
        found["least"].append(states[least.numpy()].mean(0))
        found["gradient"].append(log_norms(pulls[len(layers) :]))
        found["least_gradient"].append(log_norms(at_least))
        found["pull"].append(torch.cat([pull[0].norm(dim=0) for pull in pulls[: len(layers)]]))
    return {what: np.array(rows) for what, rows in found.items()}


def log_norms(gradients: Sequence[torch.Tensor]) -> NDArray:
    """Logarithms of their norms, ``[W]``."""
    return np.log(np.maximum([gradient.norm().item() for gradient in gradients], 1e-12))


def place(folder: Path, name: str) -> Path:
    """Where a job put a model: as a whole (of the teacher of `make never-seen-real`), merged from
    an adapter, or as it was trained."""
    whole, merged = folder / f"whole-{name}", folder / name / "merged"
    return next((path for path in (whole, merged) if path.is_dir()), folder / name)


def measured(folder: Path) -> dict[str, dict[str, Any]]:
    """Attack -> model -> AUC, and how far that is from *retrained*'s."""
    sides = [
        [text for _, text in read_documents(folder / "data" / f"{side}.jsonl")]
        for side in ("member", "nonmember")
    ]
    scores: dict[str, dict[str, Sides]] = {attack: {} for attack in ATTACKS}
    for name in MODELS:
        (spec,) = parse_models([f"{name}={place(folder, name)}"])
        tokenizer = load_tokenizer(spec)
        model = load_model(spec, dtype=torch.float32, device="cpu").eval()
        facts = [score_texts(model, tokenizer, texts) for texts in sides]
        known = [
            {"features": np.array([text_features(f) for f in one])}
            | text_states(model, tokenizer, texts)
            for one, texts in zip(facts, sides, strict=True)
        ]
        for attack, (_, what, _) in ATTACKS.items():
            scores[attack][name] = out_of_fold(attack, *(one[what] for one in known))
    return {
        attack: {
            name: {"auc": round(float(auc(*found)), 4)}
            | ({} if name == "retrained" else {"from_retrained": gap(found, by["retrained"])})
            for name, found in by.items()
        }
        for attack, by in scores.items()
    }


def gap(found: Sides, retrained: Sides) -> dict[str, Any]:
    """The paired difference of two AUC with its 90 % interval."""
    test = auc_equivalence(found, retrained)
    return {"value": round(test.value, 4), "interval": [round(test.low, 4), round(test.high, 4)]}


def tables(seeds: dict[str, Any]) -> dict[str, Any]:
    """The table of the notebook page never-seen: means over seeds, and each seed's difference."""
    rows = []
    for attack, (title, *_) in ATTACKS.items():
        of = [found[attack] for found in seeds.values()]
        means = [np.mean([one[name]["auc"] for one in of]) for name in MODELS]
        gaps = [one["match"]["from_retrained"] for one in of]
        half = np.sqrt(sum(((g["interval"][1] - g["interval"][0]) / 2) ** 2 for g in gaps))
        rows.append([
            title, *(f"{mean:.2f}" for mean in means), *(f"{g['value']:+.2f}" for g in gaps),
            f"{np.mean([g['value'] for g in gaps]):+.2f} ± {half / len(gaps):.2f}",
        ])  # fmt: skip
    each = [f"*match* above *retrained*, seed {seed}" for seed in seeds]
    columns = ["attack", *(f"*{name}*" for name in MODELS), *each, "all seeds, 90 % interval"]
    return {"attacks": {"columns": columns, "rows": rows}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("seeds", nargs="+", type=Path, help="folders of finished jobs")
    parser.add_argument("--out", type=Path, default=ROOT / "research/results/never-seen-other.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seeds = {}
    for folder in given.seeds:
        manifest = json.loads((folder / "data" / "manifest.json").read_text("utf-8"))
        seeds[str(manifest["seed"])] = measured(folder)
        print(manifest["seed"], json.dumps(seeds[str(manifest["seed"])]), flush=True)
    write_json(given.out, {"versions": versions(), "seeds": seeds, "tables": tables(seeds)})


if __name__ == "__main__":
    main()
