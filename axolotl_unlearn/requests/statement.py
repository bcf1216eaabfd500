"""What is signed: the one way to write it, what it may hold, and whose signature it bears.

Ledger, record and export are read through these forms alone: strict types, and the very bytes that
`canonical` gives, so that nothing in them has two readings.
"""

from __future__ import annotations

import importlib
import json
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    create_model,
    model_validator,
)

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.request import one_line

#: v0.1 binds rows and model alone, v0.2 the other files too; v0.3 has rows among them; v0.4 says
#: from which base, rows and versions an exact way was trained, and every try.
_TYPE = "urn:axolotl-unlearn:deletion-request:v0."
PREDICATE = f"{_TYPE}4"


def canonical(value: Any) -> bytes:
    """The one way to write a JSON value: sorted keys, no spaces, UTF-8.

    Raises:
        ValueError: NaN or infinity, which JSON does not know.
    """
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


Sha = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
#: Printed by `verify`: without line breaks and other control characters.
Line = Annotated[str, AfterValidator(lambda text: one_line(text, "a field"))]

Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT[0-9:.+Z-]{5,30}$")]


class Form(BaseModel):
    """A JSON object of one line; other keys than those named are a fault."""

    model_config = ConfigDict(strict=True, extra="forbid", serialize_by_alias=True)

    @classmethod
    def read(cls, raw: bytes) -> dict[str, Any]:
        """Raises ValueError: It is another object, or written in another way."""
        value = cls.model_validate_json(raw).model_dump(mode="json", exclude_unset=True)
        if canonical(value) + b"\n" != raw:
            raise ValueError
        return value


class Facts(Form):
    """One that may hold more."""

    model_config = ConfigDict(extra="allow")


class Head(Form):
    """Where a ledger ends; without ``mac`` before 0.3, and in an export."""

    entries: int = Field(ge=0)
    last: Sha
    mac: Sha = ""


class Excerpt(Facts):
    """What an entry of a ledger says of a request as a whole."""

    entry: PositiveInt
    time: Line
    event: Line
    request: Line
    record: Sha = ""


class Entry(Excerpt):
    """An entry of a ledger."""

    mac: Sha
    previous: Sha


class Handling(Form):
    """What only the owner knows of a request, and where its ledger ended; no part of the record."""

    by: Line
    to: Line
    reference: Line
    received: date
    due: date
    done: date
    late: bool
    request: Line
    subject: Line | None
    record: Sha
    head: Head

    @model_validator(mode="after")
    def _is_late(self) -> Handling:
        if self.late is not (self.done > self.due):
            raise ValueError
        return self


def _facts(**parts: Any) -> Any:
    return create_model("Facts", __base__=Facts, **parts)


_FILE = create_model(
    "File", __base__=Form, name=str, digest=create_model("Digest", __base__=Form, sha256=Sha)
)
_MODEL = _facts(digest=str | None, base=_facts(name=str, digest=str | None) | None)
_PREDICATE = _facts(
    request=_facts(id=Line, created=Time, recorded=Time, counts=dict[str, int], subject=(Line, "")),
    verdict=_facts(good=bool, status=str, reasons=list[str]),
    documents=list[_facts(document=Line, reading=Line)],
    model=_facts(before=_MODEL, after=_MODEL),
    limits=list[str],
    files=(dict[str, dict[str, str]], {}),
)


class Statement(Form):
    """A record, of this version or an earlier one.

    https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
    """

    type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: list[_FILE]
    predicateType: str = Field(pattern=f"^{_TYPE}[1-4]$")  # noqa: N815
    predicate: _PREDICATE


# --- signatures ----------------------------------------------------------------------------------


def sign(path: Path, private_key: Path | str) -> Path:
    """The signature of a file beside it, as ``NAME.sig``.

    Args:
        private_key: PEM file of an elliptic curve key (NIST P-256, P-384 or P-521).
    """
    config, made = _model_signing("signing").Config(), path.with_name(f"{path.name}.sig")
    try:
        config.use_elliptic_key_signer(private_key=Path(private_key)).sign(path, made)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        why = "it is a key of another kind" if type(error) is AttributeError else _first_line(error)
        raise UnlearnError(
            f"{private_key} cannot sign ({why}); give the PEM file of an elliptic "
            "curve key: `openssl ecparam -name prime256v1 -genkey -noout -out key.pem`.",
            code="record.no-signing-key",
        ) from None
    return made


def signature(path: Path, public_key: Path | str | None) -> tuple[str, str]:
    """Of a file with ``NAME.sig`` beside it: none, not compared or owner; and a sentence.

    Raises:
        UnlearnError: It is not the signature of the file under this key.
    """
    made = path.with_name(f"{path.name}.sig")
    if not made.is_file():
        return "none", "none: whoever has the key of the ledger could have written all of this"
    if public_key is None:
        return "not compared", "there is one; give `--public-key` to check it"
    config = _model_signing("verifying").Config()
    try:
        config.use_elliptic_key_verifier(public_key=Path(public_key)).verify(path, made)
    except Exception as error:  # the library raises what its parts raise
        raise UnlearnError(
            f"{made} is not that of {path.name} under {public_key} ({_first_line(error)}).",
            code="record.other-signature",
        ) from None
    return "owner", f"by the owner of {public_key}"


def check_key(public_key: Path | str | None) -> None:
    """Raises `UnlearnError`: no signature can be compared with it."""
    if public_key is not None and _model_signing("verifying") and not Path(public_key).is_file():
        raise UnlearnError(
            f"{public_key} does not exist; name the PEM file of the public key.",
            code="record.no-public-key",
        )


def _model_signing(part: str) -> Any:
    try:
        return importlib.import_module(f"model_signing.{part}")
    except ImportError:
        raise UnlearnError(
            "signatures need the package model-signing; install it: "
            "`pip install 'axolotl-unlearn[sign]'`.",
            code="record.no-model-signing",
        ) from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
