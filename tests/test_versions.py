"""Options and entry points of the Axolotl versions that we run on, whichever is installed."""

from __future__ import annotations

import runpy
import sys

import pytest

from axolotl_unlearn import versions
from axolotl_unlearn.checks import axolotl_options
from axolotl_unlearn.checks.config import PLUGIN, config_faults

ENTRY = {"path": "someone/rows", "type": "axolotl_unlearn.data.forget"}
CONFIG = {
    "plugins": [PLUGIN],
    "unlearn": {"forget": {"objective": "npo"}},
    "datasets": [ENTRY],
}


@pytest.fixture(params=[(0, 19), (0, 20), (0, 21)], ids=lambda pair: f"{pair[0]}.{pair[1]}")
def installed(request, monkeypatch) -> tuple[int, int]:
    monkeypatch.setattr(versions, "axolotl", lambda: request.param)
    return request.param


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"balance_labels": True}, True),
        ({"use_dft": True}, True),
        ({"diffusion_lm": {"objective": "masked"}}, True),
        ({"adapter": "mixlora"}, True),
        ({"context_parallel": {"size": 2}}, True),
        ({"context_parallel": {"size": 1}}, False),
        ({"balance_labels": False}, False),
        ({"adapter": "lora"}, False),
        ({"full_determinism": True}, False),
    ],
)
def test_what_newer_options_would_change_is_refused(settings, refused):
    found = [*axolotl_options.refused(settings)]
    assert len(found) == refused
    assert all(f"`{next(iter(settings))}: " in sentence for sentence in found)


def test_new_options_of_a_release_are_printed(tmp_path, capsys, monkeypatch):
    """Those that the installed Axolotl has and an older copy has not."""
    schema = tmp_path / "utils/schemas/config.py"
    schema.parent.mkdir(parents=True)
    options = sorted(axolotl_options.known() - {"seed"})
    fields = "".join(f"    {name}: int | None = None\n" for name in options)
    schema.write_text(f"class AxolotlInputConfig(Base):\n{fields}")
    monkeypatch.setattr(sys, "argv", ["axolotl_options", str(tmp_path)])
    runpy.run_module(axolotl_options.__name__, run_name="__main__")
    assert capsys.readouterr().out.split() == ["seed"]


@pytest.mark.parametrize("plugins", [None, ["axolotl_unlearn.UnlearnPlugn"], [PLUGIN]])
def test_the_plugin_need_not_be_named_where_axolotl_loads_it(installed, plugins):
    found = config_faults(CONFIG | {"plugins": plugins})
    if plugins == [PLUGIN] or (plugins is None and installed == (0, 21)):
        assert found == []
    else:
        assert any(f"`plugins:` lacks {PLUGIN}" in fault for fault in found)
