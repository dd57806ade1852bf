"""The base of every class a user's YAML fills, and the scalar types they share.

Classes are frozen and strict: no unknown key, no text taken for a number, no true taken for 1, nothing
infinite. Two readings are kinder than pydantic's, because YAML decides a scalar's type and the writer did
not: a whole number may be written ``1e3``, and where text is wanted a number or true is the text that was
written (``LR: 1e-4``, ``PY: 3.10``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from myriad.spec.errors import SpecError, quoted, sentence
from myriad.spec.yaml_text import load_yaml

AUTO: Final = "auto"  # Myriad chooses, and goes on choosing
_LARGEST = 2**63 - 1  # what a message, SQLite and a tensor's index can hold


class Spec(BaseModel):
    """Base of all spec classes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


SpecT = TypeVar("SpecT", bound=Spec)


def spec_from_yaml(kind: type[SpecT], text: str, source: str) -> SpecT:
    """Read a YAML document into ``kind``; SpecError with one sentence that begins with ``source``."""
    return spec_from_mapping(kind, load_yaml(text, source), source)


def spec_from_mapping(kind: type[SpecT], mapping: Mapping[str, Any], source: str) -> SpecT:
    """Read plain data (from YAML, JSON or ``model_dump``) into ``kind``; SpecError as above."""
    try:
        return kind.model_validate(mapping)
    except ValidationError as error:
        raise SpecError(sentence(error, kind, source)) from None


def as_text(value: Any) -> str:
    """Text as it was written; SpecError for a list, a mapping or nothing."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(getattr(value, "text", value))
    if value is None:
        raise SpecError('nothing is given where text is wanted; write "" for empty text')
    raise SpecError(f"{quoted(value)} is given where text is wanted")


def as_whole(value: Any) -> int:
    """``1e3`` as 1000; SpecError for whatever is no whole number."""
    if isinstance(value, bool) or not (
        isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    ):
        raise SpecError(f"{quoted(value)} is given where a whole number is wanted")
    return int(value)


def _auto_or_at_least(least: int) -> BeforeValidator:
    def read(value: Any) -> Any:
        if value == AUTO:
            return value
        wanted = f"where {AUTO} or a whole number of at least {least} is wanted"
        try:
            number = as_whole(value)
        except SpecError:
            raise SpecError(f"{quoted(value)} is given {wanted}") from None
        if not least <= number <= _LARGEST:
            raise SpecError(f"{number} is given {wanted}")
        return number

    return BeforeValidator(read)


def no_nul(text: str) -> str:
    """The operating system ends a string at its first NUL; refuse it here."""
    if "\0" in text:
        raise SpecError(f"{quoted(text)} holds a NUL character; remove it")
    return text


Text = Annotated[str, BeforeValidator(as_text, json_schema_input_type=str | bool | int | float)]
Count = Annotated[int, BeforeValidator(as_whole), Field(ge=1, le=_LARGEST)]
CountOrZero = Annotated[int, BeforeValidator(as_whole), Field(ge=0, le=_LARGEST)]
CountOrAuto = Annotated[Count | Literal["auto"], _auto_or_at_least(1)]
CountOrZeroOrAuto = Annotated[CountOrZero | Literal["auto"], _auto_or_at_least(0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
