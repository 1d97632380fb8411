"""Settings from a YAML file: its keys are the names of the flags, and of settings for files alone."""

from __future__ import annotations

import difflib
import json
from dataclasses import Field
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
import yaml

from tercel import limits
from tercel.cli.paths import user_name
from tercel.errors import TercelError
from tercel.reading import UnreadableError, read_text, short
from tercel.train.config import Setting


def read_settings(ctx: typer.Context, file: Path | None) -> Path | None:
    """Callback of an eager `--config` option: what the file says becomes the defaults of the other options.

    Raises `TercelError` for a file that is not a map, an unknown key, and a value that its flag would refuse.
    """
    if file is None:
        return None
    parameters: dict[str, Any] = {str(p.name).replace("_", "-"): p for p in ctx.command.params}
    del parameters["config"]
    defaults: dict[str, Any] = {}
    for key, value in _read(file).items():
        name = str(key).replace("_", "-").removeprefix("--")
        parameter = parameters.get(name)
        if parameter is None:
            near = difflib.get_close_matches(name, parameters, n=1, cutoff=0.0)
            raise TercelError(f"{file}: there is no setting {key!r}; did you mean {near[0]}?")
        if value is None:
            continue
        try:
            given = _as_given(value, many=parameter.multiple)
            parameter.process_value(ctx, given)
        except typer.BadParameter as error:
            raise TercelError(f"{file}: {key} cannot be {short(value)}: {error.message}") from error
        except TercelError as error:
            raise TercelError(f"{file}: {error}") from error
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, lists that hold themselves
            raise TercelError(f"{file}: the value of {key} cannot be written as text ({error}); repair it") from error
        defaults[parameter.name] = given
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return file


def only_in_files(ctx: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Callback of a hidden option, a setting for files alone. Raises `TercelError` if it is typed as a flag."""
    source = ctx.get_parameter_source(str(parameter.name))
    if source is not None and source.name == "COMMANDLINE":
        name, shown = str(parameter.name).replace("_", "-"), json.dumps(value, default=str)
        raise TercelError(f"--{name} is no flag; put `{name}: {shown}` into a YAML file, for --config")
    return value


def option_of(field: Field[Any], hint: Any) -> tuple[Any, Any]:
    """Default and annotation of the option for a field of a dataclass. A `Setting` becomes a flag under its heading, or
    an option for files alone; a field with an option of its own is left as it is."""
    kind, told = get_args(hint)
    if not isinstance(told, Setting):
        return field.default, hint
    default: Any = field.default
    more: dict[str, Any] = {}
    if kind == tuple[int, ...]:
        kind, default, more = str, ",".join(map(str, default)), {"parser": parse_layers}
    if field.name == "start_from":
        more = {"metavar": "HEAD", "parser": user_name}
    shown: dict[str, Any] = {"hidden": True} if told.flag is None else {"rich_help_panel": told.flag}
    if told.flag is None and not told.typed:
        shown["callback"] = only_in_files
    return default, Annotated[kind, typer.Option(help=told.help, **shown, **more)]


def parse_layers(text: str) -> tuple[int, ...]:
    """`"2,15,27"` to `(2, 15, 27)`. Raises `TercelError` for anything else."""
    return parse_numbers(text, "feature-layers", "layer numbers, such as 2,15,27")


def parse_numbers(text: str, name: str, what: str) -> tuple[int, ...]:
    """Whole numbers with commas between them. Raises `TercelError` for anything else."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise TercelError(f"{name} {text!r} is not a list of {what}") from error


def _read(file: Path) -> dict[Any, Any]:
    try:
        values = yaml.safe_load(read_text(file, limits.SETTINGS_BYTES))
    except (OSError, UnreadableError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TercelError(f"cannot read {file}: {reason}; give a YAML file of flags and values") from error
    except UnicodeDecodeError as error:
        raise TercelError(f"{file} is not UTF-8 ({error}); give a YAML file of flags and values") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the last two: dates that are none, deep nesting
        raise TercelError(f"{file} is not YAML ({' '.join(str(error).split())}); repair it") from error
    if not isinstance(values, dict):
        raise TercelError(f"{file} must be a map of flag names to values, such as `epochs: 2`")
    return values


def _as_given(value: Any, many: bool) -> Any:
    """The value as text, as it would be typed, so that the flag's own check reads it (2.5 epochs)."""
    if many and isinstance(value, dict):  # of flags that take NAME=VALUE
        return [f"{name}={json.dumps(item, default=str)}" for name, item in value.items()]
    if many:
        return [str(item) for item in (value if isinstance(value, list) else [value])]
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)
