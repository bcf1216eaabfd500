"""``axolotl-unlearn audit``: what a model knows of documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from axolotl_unlearn.cli._options import COUNT, PATH, Answer


@click.command("audit")
@click.argument("documents", type=PATH)
@click.option("--model", required=True, help="A folder, a GGUF file, or a server's http://.../v1.")
@click.option("--held-out", "heldout", type=PATH, help="Texts alike that no model saw, 20 or more.")
@click.option("--out", type=PATH, default=Path("out/audit.json"), help="What was found, no texts.")
@click.option("--chat", is_flag=True, help="Ask questions through the chat template.")
@click.option("--max-new-tokens", type=COUNT, default=128)
@click.option("--device", help="Of a folder.  [default: the accelerator, else cpu]")
@click.option("--dtype", help="Of a folder.  [float32 on cpu, else the checkpoint's own]")
def command(documents: Path, out: Path, **options: Any):
    """Say of each of DOCUMENTS whether a model says, recites or recognises it.

    DOCUMENTS are JSON lines of `question` and `answer`, or of `document`. No training data and no
    other model is needed. Held-out texts of the same kind add what only they can: whether a text is
    recognised where it is not said, and how often the rule of recital fires by chance. (`request
    audit` is another thing: a folder of weights against the record of your deletion requests.)

    \b
    axolotl-unlearn audit documents.jsonl --model http://localhost:8000/v1
    axolotl-unlearn audit texts.jsonl --model model.gguf --held-out others.jsonl
    """
    from axolotl_unlearn.evaluation.known import audit_documents, shown
    from axolotl_unlearn.files import write_json

    found = audit_documents(documents, **options)
    write_json(out, found, private=True)
    return Answer({"file": out, **found}, shown(out, found))
