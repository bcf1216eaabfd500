"""How likely the retrained model gives an answer in the tokens in which another model gave it.

An answer has many spellings in tokens. A model that never saw it may write another one than the
tokenizer's (an e-mail address from a name), of which the log-prob of the tokenizer's says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axolotl_unlearn.evaluation.measure import Local, Session
from axolotl_unlearn.metrics.audit import surplus
from axolotl_unlearn.metrics.results import Model, read
from axolotl_unlearn.metrics.words import contains_answer
from axolotl_unlearn.models import ModelSpec

#: Ids of a prompt and of what was generated up to the end of the answer.
Spelling = tuple[list[int], list[int]]


def add_spellings(
    session: Session, specs: Sequence[ModelSpec], results: Sequence[dict[str, Any]],
    keys: Mapping[str, str],
) -> None:  # fmt: skip
    """``extraction.control_logp`` of each candidate: of the answers that it gives and the retrained
    model does not, what that model gives to the generated tokens (nats, summed). The candidate is
    loaded again for these rows, the retrained model once."""
    models = [read(Model, result, result["name"]) for result in results]
    control = next((one for one in models if one.part == "retrained"), None)
    if control is None:
        return
    theirs, todo = {row.id: row for row in control.texts}, {}
    for spec, model, result in zip(specs, models, results, strict=True):
        asked = [row.id for row in surplus(model, theirs)] if model.part == "candidate" else ()
        if not asked:
            continue
        key = f"{keys[spec.name]}-spellings-{keys[control.name]}"
        known = session.cache.get(key)
        if known is None:
            todo[key] = result, _paths(session, session.load(spec), asked)
        else:
            _put(result, known)
    if todo:
        own = session.load(next(spec for spec in specs if spec.name == control.name))
    for key, (result, paths) in todo.items():
        known = _scores(own, paths)
        session.cache.put(key, known)
        _put(result, known)


def _put(result: dict[str, Any], known: Mapping[str, float]) -> None:
    texts = result["extraction"]
    texts["control_logp"] = [known.get(name) for name in texts["id"]]


def _paths(session: Session, model: Local, asked: Sequence[str]) -> tuple[Any, dict[str, Spelling]]:
    """The tokenizer, and by row what is generated until the answer is said."""
    from axolotl_unlearn.evaluation.generate import generate_greedily

    records = {record.id: record for record in session.sets.forget}
    prompts = [records[name].input for name in asked]
    made: dict[int, list[int]] = {}
    how = {"max_new_tokens": session.settings.max_gen_toks, "tokens": made}
    generate_greedily(
        model.model, model.tokenizer, prompts, batch_size=session.settings.batch_size, **how
    )
    paths = {}
    for number, name in enumerate(asked):
        ids, answer = made[number], records[name].output
        says = [contains_answer(model.tokenizer.decode(ids[:n]), answer)
                for n in range(len(ids) + 1)]  # fmt: skip
        if says[-1]:  # the last beginning that does not say it, and one token more
            end = len(ids) - says[::-1].index(False) + 1
            paths[name] = model.tokenizer(prompts[number])["input_ids"], ids[:end]
    return model.tokenizer, paths


def _scores(model: Local, made: tuple[Any, Mapping[str, Spelling]]) -> dict[str, float]:
    """Of each path that is the same text in the model's own tokens."""
    from axolotl_unlearn.engine.token_scoring import Query, score_queries

    tokenizer, paths = made
    same = {
        name: path for name, path in paths.items()
        if all(model.tokenizer.decode(ids) == tokenizer.decode(ids) for ids in path)
    }  # fmt: skip
    asked = [Query.of([*prompt, *said], len(prompt)) for prompt, said in same.values()]
    facts = score_queries(model.model, asked, loss_only=True) if asked else ()
    return {name: float(one.logp.sum()) for name, one in zip(same, facts, strict=True)}
