"""Groups of options: a command may take a whole frozen dataclass as if it were one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from tercel.cli.settings import option_of


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it: each parameter that is a dataclass spread into the dataclass's fields.

    The fields are `Annotated[type, typer.Option(…)]` or settings, with defaults; the command itself gets an instance.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        group = groups.get(parameter.name)
        if group is None:
            parameters.append(_keyword(parameter.name, parameter.default, hints[parameter.name]))
        else:
            kinds = get_type_hints(group, include_extras=True)
            parameters += [_keyword(f.name, *option_of(f, kinds[f.name])) for f in fields(group)]

    def called_by_typer(**values: Any) -> None:
        built = {name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        command(**values, **built)

    called_by_typer.__doc__ = command.__doc__
    called_by_typer.__name__ = command.__name__
    called_by_typer.__annotations__ = {p.name: p.annotation for p in parameters}
    called_by_typer.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called_by_typer


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
