"""The `unlearn:` block: strict, with the nearest name for what is misspelt; presets."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from axolotl_unlearn.args import parse_unlearn, preset_names
from axolotl_unlearn.errors import UnlearnError


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"forgett": {"objective": "npo"}}, "`unlearn.forgett` is not a key.*'forget'"),
        ({"data": {"joinn": ""}}, "`unlearn.data.joinn` is not a key.*'join'"),
        ({"data": {"labels": {"question": "all"}}}, "labels.question"),
        ({"forget": {"objective": "npo", "betaa": 1}}, "no parameter 'betaa'.*'beta'"),
        ({"forget": {"objective": "nppo"}}, "no objective 'nppo'.*'npo'"),
        ({"forget": {"objective": "npo", "beta": 0}}, "beta.*greater than 0"),
        ({"forget": {"objective": "npo", "beta": "x"}}, "beta.*valid number"),
        ({"forget": {"objective": "npo", "weight": -1}}, "weight.*greater than 0"),
        ({"forget": {"objective": "npo", "weight": float("nan")}}, "weight"),
        ({"forget": {"objective": "npo", "reduction": "summ"}}, "reduction.*'sum'"),
        ({"forget": {"objective": "npo", "kinds": "answers"}}, "kinds"),
        ({"forget": {"objective": "npo", "positions": "all"}}, "label positions only"),
        ({"retain": {"objective": "ga"}}, "ga forgets.*under `retain:`.*move it to `forget:`"),
        ({"forget": {"objective": "nll"}}, "nll keeps.*under `forget:`.*move it to `retain:`"),
        ({"retain": [{"objective": "nll"}, {"objective": "npo"}]}, "npo forgets.*`retain:`"),
        ({"forget": {"objective": "npo", "divide_by_length": 256}}, "averaged over rows.*nothing"),
        ({"preset": "zjuklab-papr"}, "no preset.*'zjuklab-paper'"),
        ({"reference": "copy"}, "reference"),
        ({"data": {"template": "{input}"}}, "{output}"),
        ({"data": {"chat_template": True, "labels": {"completion": "document"}}}, "role headers"),
        ("npo", "must be a block"),
    ],
)
def test_faults_are_one_sentence_with_the_key(block, says):
    with pytest.raises(UnlearnError, match=says) as caught:
        parse_unlearn(block)
    assert "\n" not in str(caught.value)


def test_entries_take_one_or_a_list():
    one = parse_unlearn({"forget": {"objective": "npo", "kinds": "question"}})
    many = parse_unlearn({"forget": [{"objective": "npo", "kinds": ["question"]}]})
    assert one == many and one.forget[0].kinds == ["question"]


def test_presets_hold_the_published_coefficients():
    """arXiv 2503.21088 Table 3: (.4, .4, .2) and (.3, .3, .4) as NPO, GDR, KLR; the released code
    gives the second coefficient to KL and the third to NLL."""

    def weights(name):
        return {e.objective: e.weight for _, e in parse_unlearn({"preset": name}).entries()}

    assert weights("zjuklab-paper") == {"npo": 0.4, "nll": 0.4, "kl": 0.2}
    assert weights("zjuklab-paper-model2") == {"npo": 0.3, "nll": 0.3, "kl": 0.4}
    assert weights("zjuklab-code") == {"npo": 0.4, "kl": 0.4, "nll": 0.2}
    assert weights("zjuklab-code-model2") == {"npo": 0.3, "kl": 0.3, "nll": 0.4}
    assert parse_unlearn({"preset": "zjuklab-code"}).forget[0].parameters == {
        "beta": 0.1,
        "reduction": "batch_token_mean",
    }


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_can_be_changed_in_part(name):
    args = parse_unlearn({"preset": name, "forget": {"objective": "simnpo"}})
    assert [e.objective for e in args.forget] == ["simnpo"] and len(args.retain) == 2


def test_a_preset_keeps_the_keys_of_its_blocks_that_are_not_given():
    args = parse_unlearn(
        {"preset": "zjuklab-code", "data": {"eos": "retain", "labels": {"question": "document"}}}
    )
    assert (args.data.eos, args.data.join, args.data.max_length) == ("retain", "", 256)
    assert (args.data.labels.completion, args.data.labels.question) == ("answer", "document")


def test_a_preset_is_written_out():
    """What the log and `check` say is itself a block with the same meaning."""
    args = parse_unlearn({"preset": "zjuklab-paper", "pairing": {"retain_per_forget": 2}})
    block = yaml.safe_load(args.expanded())["unlearn"]
    assert "preset" not in block and block["forget"] == [
        {"objective": "npo", "weight": 0.4, "beta": 0.1, "reduction": "sum"}
    ]
    assert parse_unlearn(block).model_dump(exclude={"preset"}) == args.model_dump(
        exclude={"preset"}
    )


def test_importing_the_package_is_light():
    """No torch, Axolotl, mergekit or lm-eval behind a plain import."""
    code = (
        "import sys, axolotl_unlearn, axolotl_unlearn.errors; "
        "print([m for m in ('torch', 'axolotl', 'mergekit', 'lm_eval', 'transformers') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_misspelt_plugin_class_is_an_error_that_names_the_right_one():
    import axolotl_unlearn

    with pytest.raises(AttributeError, match="axolotl_unlearn.UnlearnPlugin"):
        _ = axolotl_unlearn.UnlearnPlugn
