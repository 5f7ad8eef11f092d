"""Explains why a mapping does not fit a pydantic model.

Each problem is one readable line, which never shows the wrong value.

Tested in `tests/core/config/test_model.py`.
"""

from __future__ import annotations

from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from penstock.core.errors import ConfigError
from penstock.core.suggest import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_SHOULD = "Input should be "
_Model = TypeVar("_Model", bound=BaseModel)


def validated(
    model: type[_Model], values: Mapping[str, Any], /, *, what: str, place: str = ""
) -> _Model:
    """Return an instance of `model` made from `values`.

    Args:
        model: A pydantic model.
        values: The fields by name.
        what: Name of the mapping in messages (`"the options of codec zstd"`).
        place: The place of the mapping in a configuration (`"backend"`).

    Raises:
        ConfigError: Some keys are wrong. The message lists each, with the nearest valid name of an
            unknown key.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise refusal(error, model, what=what, place=place) from None


def refusal(
    error: ValidationError, model: type[BaseModel], /, *, what: str, place: str = ""
) -> ConfigError:
    """Return the error to raise `from None` for `error`, whose own text may show secrets."""
    problems = explain(error, model, place)
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    return ConfigError("\n".join([f"{what}: {count}", *problems]))


def explain(error: ValidationError, model: type[BaseModel], above: str = "") -> list[str]:
    """Return one line per problem of `error`, which `model` raised, without the wrong values.

    A value that matches no member of a union is one problem.
    """
    found: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        place, holders = _located(model, problem["loc"])
        text = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            text = f"unknown key{_meant(model, place, holders)}"
        elif problem["type"] == "tuple_type":  # ours are lists in every file, and may be in Python
            text = "Input should be a list"
        elif problem["type"] in {"model_type", "dict_type"}:  # a file has no classes
            text = "Input should be a table"
        where = ".".join(filter(None, [above, _shown(place)]))
        found.setdefault(where, []).append(text)
    return [
        f"  {where}: {_any_of(texts)}" if where else f"  {_any_of(texts)}"
        for where, texts in found.items()
    ]


def _any_of(texts: Sequence[str]) -> str:
    """Merge several messages about the same place."""
    if len(texts) > 1 and all(text.startswith(_SHOULD) for text in texts):
        shapes = (text.removeprefix(_SHOULD).partition(", unable to")[0] for text in texts)
        kinds = dict.fromkeys(shapes)
        return f"{_SHOULD}{' or '.join(kinds)}"
    return "; ".join(dict.fromkeys(texts))


def _located(
    model: type[BaseModel], loc: Sequence[int | str]
) -> tuple[list[int | str], list[object]]:
    """Return the place that `loc` names, and the annotations of the place's parent.

    Omits parts that select a member of a union, since users do not know these: type names, and
    tags written `<like this>`.
    """
    place: list[int | str] = []
    holders: list[object] = []
    annotations: list[object] = [model]
    kind_follows = False
    for part in loc:
        if kind_follows or str(part).startswith("<"):
            kind_follows = False
            continue
        place.append(part)
        holders = annotations
        annotations = [inner for one in holders for inner in _below(one, part)]
        kind_follows = any(len(_members(one)) > 1 for one in annotations)
    return place, holders


def _below(annotation: object, part: int | str) -> Iterator[object]:
    """Yield the possible annotations of `part` of a value with the type `annotation`."""
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            if part in member.model_fields:
                yield member.model_fields[str(part)].annotation
        else:
            yield from get_args(member)


def _members(annotation: object) -> Sequence[object]:
    """Return the members of a union, except None; for other annotations, the annotation itself."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in {Union, UnionType}:
        inner = [m for one in get_args(annotation) for m in _members(one)]
        return [m for m in inner if m is not type(None)]
    return [annotation]


def _meant(model: type[BaseModel], place: Sequence[int | str], holders: Sequence[object]) -> str:
    """Return a hint for an unknown key: the table that has such a key, or the nearest names."""
    name = str(place[-1])
    if len(place) == 1:
        for field, info in model.model_fields.items():
            if any(name in inner.model_fields for inner in _models_in(info.annotation)):
                table = f"[[{field}]]" if _is_list(info.annotation) else f"[{field}]"
                return f"; it belongs in {table}"
    return nearest(name, [n for one in holders for m in _models_in(one) for n in m.model_fields])


def _is_list(annotation: object) -> bool:
    return get_origin(annotation) is tuple


def _shown(place: Sequence[int | str]) -> str:
    shown = ""
    for part in place:
        shown += f"[{part}]" if isinstance(part, int) else f".{part}"
    return shown.removeprefix(".")


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
