"""``axolotl-unlearn examples``"""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._options import FOLDER, Answer
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write


@click.command("examples")
@click.argument("out", type=FOLDER, default=Path("examples"), required=False)
def command(out: Path):
    """Write the example configs and their data into the folder OUT.

    Their paths begin where the command is run. OUT must not exist.

    \b
    Example:
      axolotl-unlearn examples
      axolotl-unlearn check examples/tofu/forget.yml
    """
    package = Path(__file__).resolve().parents[1]
    places = (package / "examples", package.parent / "examples")  # of a wheel, of a checkout
    source = next((place for place in places if (place / "memorise.yml").is_file()), None)
    if source is None:
        says = "the examples are not beside the package"
        raise UnlearnError(f"{says}; install axolotl-unlearn again.", code="examples.missing")
    if out.exists():
        raise UnlearnError(f"{out} exists; name another folder.", code="examples.exists")
    files = sorted(path for path in source.rglob("*") if path.is_file())
    for path in files:
        raw = path.read_bytes()
        if path.suffix in (".yml", ".md"):
            raw = raw.replace(b"examples/", f"{out.as_posix()}/".encode())
        write(out / path.relative_to(source), raw)
    said = f"{out}: {len(files)} files; {out}/README.md lists the configs."
    return Answer({"folder": out, "files": len(files)}, [said])
