"""`axolotl unlearn request verify | sign`: what a deletion request left behind."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._json import answer


@click.command("verify")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--model", help="Where the model is now: a folder or base+adapter.  [as recorded]")
@click.option("--public-key", type=click.Path(path_type=Path), help="PEM file of who signed it.")
def verify_(folder: Path, model: str | None, public_key: Path | None) -> None:
    """Compare ledger, record, model, data and signature of the request in FOLDER.

    FOLDER may be the file that `request export` wrote.

    Exit code 2 and one sentence at the first thing that is not as it was.

    \b
    Example:
      axolotl unlearn request verify requests/2026-001
      axolotl unlearn request verify requests/2026-001 --model out/deployed --public-key key.pub
    """
    from axolotl_unlearn.requests import export, record

    said = (export if folder.is_file() else record).verify(folder, model, public_key)
    answer(says=said)
    click.echo("\n".join(said))


@click.command("sign")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--key", "private_key", required=True, type=click.Path(path_type=Path), help="PEM, EC."
)
def sign_(folder: Path, private_key: Path) -> None:
    """Sign the record, and through its digests the model, with your own key.

    Needs `pip install 'axolotl-unlearn[sign]'` (model-signing).

    \b
    Example:
      openssl ecparam -name prime256v1 -genkey -noout -out key.pem
      openssl ec -in key.pem -pubout -out key.pub
      axolotl unlearn request sign requests/2026-001 --key key.pem
    """
    from axolotl_unlearn.requests.record import sign

    signature = sign(folder, private_key)
    answer(signature=signature)
    click.echo(f"Signature: {signature}")


COMMANDS = (verify_, sign_)
