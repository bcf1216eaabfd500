"""What is made of a record: a page and a record for each subject, for readers; for tools in-toto
Test Results, a SLSA summary and a CycloneDX ML-BOM.

``attestations.intoto.jsonl`` holds a Statement a line about the files of the new model: a Test
Result for each attack, then the Verification Summary of the verdict. ``bom.cdx.json`` says from
which model it was made. All are made from the record alone, which binds their digests.

https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md
https://slsa.dev/spec/v1.1/verification_summary
https://cyclonedx.org/capabilities/mlbom
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from axolotl_unlearn.metrics.audit import READINGS
from axolotl_unlearn.metrics.intervals import holm
from axolotl_unlearn.metrics.verdict import THRESHOLDS, strongest_gain, wrecks
from axolotl_unlearn.requests.ledger import Ledger, canonical
from axolotl_unlearn.requests.request import read_json

STATEMENT = "https://in-toto.io/Statement/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
SUMMARY = "https://slsa.dev/verification_summary/v1"
ATTESTATIONS, BOM = "attestations.intoto.jsonl", "bom.cdx.json"
#: Of a request: which rows are whose.
SUBJECTS = "subjects.json"
Statement = Mapping[str, Any]


# --- for readers ---------------------------------------------------------------------------------


def readings(statement: Statement) -> dict[str, int]:
    """Documents by reading, worst first."""
    counts = Counter(line["reading"] for line in statement["predicate"]["documents"])
    return {reading: counts.get(reading, 0) for reading in READINGS}


def page(statement: Statement, *, evaluation: bool = False) -> str:
    """REPORT.html: one page, no script, nothing from elsewhere, no text of a row.

    Args:
        evaluation: link to the evaluation's own page, eval/report.html.
    """
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup, escape

    from axolotl_unlearn.report import page as report

    css = (Path(report.__file__).parent / "page.css").read_text(encoding="utf-8")
    templates = Environment(loader=PackageLoader(__package__, "."), autoescape=True)
    templates.filters["says"] = lambda text: Markup(
        re.sub("`([^`]*)`", r"<code>\1</code>", escape(text[:1].upper() + text[1:]))
    )
    shown = templates.get_template("report.html.j2").render(
        record=statement["predicate"],
        subjects=statement["subject"],
        readings=readings(statement),
        evaluation=evaluation,
        css=Markup(css),
    )
    return report.harmless(shown)


def subjects(folder: Path, statement: Statement) -> dict[str, bytes]:
    """The records of a request's subjects and their pages, by name below its folder: each is the
    record of the request without the rows of others."""
    every = read_json(folder / SUBJECTS) or {}
    ledger, whole, pages = Ledger(folder.parent), statement["predicate"], {}
    for name, rows in every.items():
        mine = {ledger.keyed(row) for row in rows}
        documents = [line for line in whole["documents"] if line["document"] in mine]
        counts = {"forget": len(rows), "documents": len(documents)}
        own = {
            "request": whole["request"] | {"subject": name, "counts": counts, "chosen": {}},
            "documents": documents,
            "limits": [
                *whole["limits"],
                f"The model was made for {len(every)} subjects together: verdict, attacks and "
                "times are those of all their rows.",
            ],
        }
        rest = {key: value for key, value in whole.items() if key != "files"}
        record = {**statement, "predicate": rest | own}
        pages[f"subjects/{name}/record.json"] = canonical(record) + b"\n"
        pages[f"subjects/{name}/REPORT.html"] = page(record).encode()
    return pages


# --- for tools -----------------------------------------------------------------------------------


def judged(attack: Mapping[str, Any]) -> dict[str, Any]:
    """``result`` of an attack's file, and the ``failed`` variants.

    Returns:
        FAILED: a variant brings rows back, or tells them, beyond chance. WARNED: it shows nothing,
        its own training did away with the texts. Else PASSED.
    """
    alpha = THRESHOLDS["alpha"].value
    if "views" in attack:
        views = list(attack["views"].values())
        corrected = holm([view["told"]["p"] for view in views])
        failed = [v["title"] for v, p in zip(views, corrected, strict=True) if p < alpha]
    else:
        row, _, p, _ = strongest_gain(attack["rows"])
        failed = [row["variant"]] if p < alpha else []
    idle = not failed and "rows" in attack and wrecks(attack)
    return {"result": "FAILED" if failed else "WARNED" if idle else "PASSED", "failed": failed}


def for_tools(statement: Statement) -> dict[str, bytes]:
    """The files by name; the BOM only where cyclonedx-python-lib is installed (extra ``sign``)."""

    def line(kind: str, predicate: Mapping[str, Any]) -> bytes:
        one = {"_type": STATEMENT, "subject": statement["subject"], "predicateType": kind}
        return canonical(one | {"predicate": predicate}) + b"\n"

    tests = [line(TEST_RESULT, one) for one in _tests(statement["predicate"])]
    lines = [*tests, line(SUMMARY, _summary(statement["predicate"], tests))]
    bom = _bom(statement)
    return {ATTESTATIONS: b"".join(lines)} | ({} if bom is None else {BOM: bom})


def _tests(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    tests = []
    for attack in record["attacks"]:
        result, failed = attack.get("result", "WARNED"), attack.get("failed", [])
        names = {one: f"{attack['attack']}/{one}" for one in attack["variants"]}
        held = [name for one, name in names.items() if one not in failed]
        configuration = [{"name": "finetune.yml", "digest": record["config"]["digest"]}]
        configuration += [{"name": attack["attack"], "digest": attack["digest"]}]
        tests.append(
            {
                "result": result,
                "configuration": configuration,
                # Of a failed attack the strongest variant is judged, of the others none.
                "passedTests": held if result == "PASSED" else [],
                "warnedTests": [] if result == "PASSED" else held,
                "failedTests": [names[one] for one in failed],
            }
        )
    return tests


def _summary(record: Mapping[str, Any], tests: list[bytes]) -> dict[str, Any]:
    verdict = record["verdict"]
    shown = verdict["good"]
    digests = [hashlib.sha256(line).hexdigest() for line in tests]
    return {
        "verifier": {"id": "urn:axolotl-unlearn"},
        "timeVerified": _time(record).isoformat().replace("+00:00", "Z"),
        "resourceUri": f"urn:axolotl-unlearn:deletion-request:{quote(record['request']['id'])}",
        "policy": {"uri": "urn:axolotl-unlearn:verdict:shown"},
        "inputAttestations": [
            {"uri": f"{ATTESTATIONS}#{number}", "digest": {"sha256": digest}}
            for number, digest in enumerate(digests, start=1)
        ],
        # A model that somebody accepted has not passed.
        "verificationResult": "PASSED" if shown else "FAILED",
        "verifiedLevels": ["AXOLOTL_UNLEARN_SHOWN" if shown else "FAILED"],
    }


def _time(record: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(record["request"]["recorded"])


def _bom(statement: Statement) -> bytes | None:
    try:
        from cyclonedx.model import HashAlgorithm, HashType, Property
        from cyclonedx.model.bom import Bom, BomMetaData
        from cyclonedx.model.component import Component, ComponentType, Pedigree
        from cyclonedx.output.json import JsonV1Dot6
    except ImportError:
        return None
    record = statement["predicate"]
    request, verdict = record["request"], record["verdict"]

    def model(name: str, facts: Mapping[str, Any] | None, **more: Any) -> Component:
        digest = facts and facts["digest"]
        known = [Property(name="axolotl-unlearn:weights-digest", value=digest)] if digest else []
        known += more.pop("properties", [])
        kind = ComponentType.MACHINE_LEARNING_MODEL
        return Component(name=name, type=kind, bom_ref=name, properties=known, **more)

    before, after = record["model"]["before"], record["model"]["after"]
    parents = [model("model before", before)]
    if base := after["base"]:
        parents.append(model("base model", base, description=base["name"]))
    facts = {"verdict": verdict["outcome"] or verdict["status"], "record": "record.json"}
    new = model(
        "model after",
        after,
        properties=[Property(name=f"axolotl-unlearn:{k}", value=v) for k, v in facts.items()],
        pedigree=Pedigree(
            ancestors=parents,
            notes=f"Deletion request {request['id']}: {request['counts'].get('forget', '?')} rows "
            f"of the training data of the model before were removed.",
        ),
        components=[
            Component(
                name=file["name"],
                type=ComponentType.FILE,
                bom_ref=f"file:{file['name']}",
                hashes=[HashType(alg=HashAlgorithm.SHA_256, content=file["digest"]["sha256"])],
            )
            for file in statement["subject"]
        ],
    )
    number = uuid.uuid5(
        uuid.NAMESPACE_URL, hashlib.sha256(canonical(statement["subject"])).hexdigest()
    )
    metadata = BomMetaData(component=new, timestamp=_time(record))
    bom = Bom(metadata=metadata, serial_number=number)
    return (JsonV1Dot6(bom).output_as_string(indent=1) + "\n").encode()
