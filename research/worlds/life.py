"""Data of a tiny model with a life like a real one: it read widely before it was fine-tuned.

The demo's model learns everything from scratch, so nothing came before the forget set. Here a
*base* reads background documents of all three kinds with their questions, and the facts of general
knowledge; *original* is the base tuned on forget and retain rows, *retrained* the base tuned on the
retain rows alone. Held-out documents are of the same kinds and in no stream: the level of text
that was never seen is read off them, and the non-members stay for judging alone.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write_json
from research.worlds import generate
from research.worlds.generate import Document, Sizes


@dataclass(frozen=True)
class LifeSizes:
    """How many documents there are, and how often each stream reads them.

    Attributes:
        stories, pii: Documents a side (forget and retain each).
        facts_forget, facts_retain: Task3 documents; the forget ones are the members.
        nonmembers: Task3 documents for judging only.
        heldout: Task1, Task2 and Task3 documents that no stream holds.
        background: Task1, Task2 and Task3 documents that the base reads.
        general: Four-option questions of general knowledge, read by the base.
        replay: Further such facts, and ``replay_rows`` rows of the background: what a user has at
            hand of the model's earlier reading (`replay.jsonl`); no question asks them.
        base_passes: Passes of the base over its background.
        general_repeats: How often such a pass reads the general facts.
        passes: Passes of *original* and *retrained* over their rows.
    """

    stories: int = 24
    pii: int = 20
    facts_forget: int = 80
    facts_retain: int = 60
    nonmembers: int = 160
    heldout: tuple[int, int, int] = (72, 60, 240)
    background: tuple[int, int, int] = (600, 500, 1500)
    general: int = 60
    replay: int = 50
    replay_rows: int = 400
    base_passes: int = 3
    general_repeats: int = 8
    passes: int = 16
    pii_repeats: int = 2


def make_life(out: Path | str, seed: int = 0, sizes: LifeSizes = LifeSizes()) -> dict:  # noqa: B008
    """Write the data into `out` and return its manifest.

    Files: forget, retain, member, nonmember, general as in `generate.make_data`; heldout and
    background (rows of all kinds), replay; the streams base, memorise and retrain (all passes in
    training order, one epoch); ``manifest.json``.

    Raises:
        UnlearnError: If the sizes cannot be made or `out` cannot be written.
    """
    out = Path(out)
    same = ("stories", "pii", "facts_forget", "facts_retain", "nonmembers", "general", "replay",
            "pii_repeats")  # fmt: skip
    known = {name: getattr(sizes, name) for name in same}
    demo = Sizes(**known, background=0, background_per_pass=0)
    corpus = generate.make_corpus(seed, demo)
    people = generate._people(seed)
    named = sum(len(side) for side in (corpus.forget, corpus.retain, corpus.nonmembers))
    try:
        for _ in range(named):
            next(people)

        def documents(part: str, counts: tuple[int, int, int]) -> list[Document]:
            made = []
            for (task, kind), count in zip(generate.KINDS.items(), counts, strict=True):
                rng = random.Random(f"{seed}/{part}/{task}")
                made += [kind(rng, next(people)) for _ in range(count)]
            return made

        background = documents("life/background", sizes.background)
        heldout = documents("life/heldout", sizes.heldout)
    except StopIteration:
        raise UnlearnError(
            "The sizes ask for more people than there are names; lower `background`."
        ) from None
    known, replay = (
        [generate._row(i["id"], i["question"], i["choices"][i["answer"]], "general") for i in part]
        for part in (corpus.general, corpus.replay)
    )
    rows = {
        "forget": generate._rows(corpus.forget),
        "retain": generate._rows(corpus.retain),
        "background": generate._rows(background),
        "heldout": generate._rows(heldout),
    }

    def stream(name: str, of: list[dict[str, str]], passes: int) -> list[dict[str, str]]:
        rng = random.Random(f"{seed}/life/{name}")
        return generate._stream(rng, demo, of, [[] for _ in range(passes)])

    some = random.Random(f"{seed}/life/replay")
    count = min(sizes.replay_rows, len(rows["background"]))
    # A task of their own, so that a config can tell them from the rows to be kept word by word.
    rows["replay"] = [
        row | {"task": "replay"} for row in some.sample(rows["background"], count)
    ] + replay
    # The base reads each document as often as any other: no repeats of personal data.
    once = random.Random(f"{seed}/life/base")
    everything = rows["background"] + (known + replay) * sizes.general_repeats
    contents = {
        **rows,
        "member": generate._documents([d for d in corpus.forget if d.task == "Task3"]),
        "nonmember": generate._documents(corpus.nonmembers),
        "general": corpus.general,
        "base": generate._stream(
            once, Sizes(pii_repeats=1), everything, [[] for _ in range(sizes.base_passes)]
        ),
        "memorise": stream("memorise", rows["forget"] + rows["retain"], sizes.passes),
        "retrain": stream("retrain", rows["retain"], sizes.passes),
    }
    files = {name: generate._write(out / f"{name}.jsonl", part) for name, part in contents.items()}
    manifest = {"synthetic": True, "seed": seed, "sizes": asdict(sizes), "files": files}
    write_json(out / "manifest.json", manifest)
    return manifest
