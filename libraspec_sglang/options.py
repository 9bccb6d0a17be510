"""Every user-facing option, in one place: its name, default, range and help text.

The same option is reachable five ways, weakest first:

1. the default below;
2. an environment variable, ``LIBRASPEC_ALPHA=1.8``;
3. a flag, ``--libraspec-alpha 1.8``, or the same key in SGLang's ``--config FILE.yaml``;
4. ``libraspec_sglang.configure(alpha=1.8)`` before the engine is created;
5. per request, ``sampling_params.custom_params = {"libraspec_alpha": 1.8}``.

Ways 3 and 4 write the environment variable of way 2: SGLang spawns its scheduler, and the
environment is what every child process inherits.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

ENV_PREFIX = "LIBRASPEC_"
FLAG_PREFIX = "--libraspec-"
REQUEST_PREFIX = "libraspec_"

OTHER_VARIABLES = ("LIBRASPEC_CPU", "LIBRASPEC_CPU_GRAPHS", "LIBRASPEC_CACHE")
"""Ours, read elsewhere: not options of the controller."""

MAX_ALPHA = 1e6  # verifies everything long before
PolicyName = Literal["auto", "libra", "libraspec", "failfast", "gemma", "static", "none"]
ExtensionName = Literal["wide", "block"]
GraphsName = Literal["whole", "ragged"]


class OptionError(ValueError):
    """An option has a value it cannot have. The message names the option and the fix."""


class Options(BaseModel):
    """The server's options. Field descriptions are the help texts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyName = Field(
        "auto",
        description="How many drafted tokens each request verifies per round: 'libra' (measured "
        "cost, calibrated confidences, the whole batch at once), 'libraspec' (Algorithm 1 of "
        "arXiv 2608.08721), 'failfast' (grows by increments while the drafter is confident), "
        "'gemma' (+2 after a round accepted whole, else -1), 'static' (always "
        "--libraspec-static-length), 'none' (plain decoding, nothing is drafted). 'auto' is libra "
        "where rounds can be timed from the host (CPU), else libraspec.",
    )
    alpha: float = Field(
        2.2,
        gt=0,
        le=MAX_ALPHA,
        allow_inf_nan=False,
        description="T / (tau * c) of policy 'libraspec': how much one expected accepted token is "
        "worth in verified tokens. Larger verifies more. The paper uses 2.2 for DFlash; 1.6 to "
        "2.4 all beat no control there.",
    )
    max_length: int | None = Field(
        None,
        ge=1,
        le=256,
        description="d_max, the most drafted tokens a request may verify in a round. Default: "
        "one and a half times the draft checkpoint's block size (24 for 16, as in the paper).",
    )
    static_length: int | None = Field(
        None,
        ge=0,
        le=256,
        description="Drafted tokens verified per round under --libraspec-policy static. Default: "
        "the draft checkpoint's block size minus one (what SGLang's DFLASH verifies).",
    )
    threshold: float = Field(
        0.45,
        gt=0,
        lt=1,
        allow_inf_nan=False,
        description="tau of policy 'failfast': an increment with a confidence below it is the "
        "last. FailFast's own default; 0.4 to 0.5 in its settings.",
    )
    increment: int = Field(
        10,
        ge=1,
        le=256,
        description="N of policy 'failfast': drafted tokens verified at first and added at a time, "
        "up to --libraspec-max-length. FailFast's own default.",
    )
    extension: ExtensionName = Field(
        "block",
        description="Where tokens past the first block come from: 'block' drafts one block, as the "
        "drafter was trained to, and a further one, conditioned on the drafted tokens, only when "
        "the controller asks for it; 'wide' drafts d_max tokens in one pass. Policies 'libraspec' "
        "and 'failfast' only; 'libra' chooses the width of its one pass itself.",
    )
    graphs: GraphsName = Field(
        "whole",
        description="What is verified where the target runs in CUDA graphs: the 'whole' window of "
        "every request, or 'ragged', the decided lengths, in graphs by the number of rows. "
        "'ragged' needs --attention-backend flashinfer and has not been run on a GPU yet.",
    )
    cost: str | None = Field(
        None,
        description="What rounds cost on this machine, for policy 'libra': a file written by "
        "`libraspec profile`, refused where machine, target or drafter are others. Without it the "
        "server starts from a conservative prior. Either is refined by the server's own rounds "
        "(on a CPU; on a CUDA device libra needs the file).",
    )
    cost_unchecked: bool = Field(
        False,
        description="Use --libraspec-cost though it was measured for another machine or model "
        "(true or false).",
    )
    trace: str | None = Field(
        None,
        description="Write one JSON line per decode round to this file: lengths, confidences, "
        "accepted tokens, seconds per part. No text. Costs a little; off by default.",
    )


class RequestOptions(BaseModel):
    """What a request may set for itself in ``custom_params`` (prefix ``libraspec_``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_length: int | None = Field(None, ge=0, le=256)
    alpha: float | None = Field(None, gt=0, le=MAX_ALPHA, allow_inf_nan=False)


def env_name(field: str) -> str:
    """Environment variable of an option."""
    return ENV_PREFIX + field.upper()


def flag_name(field: str) -> str:
    """Command-line flag of an option."""
    return FLAG_PREFIX + field.replace("_", "-")


def load(environ: Mapping[str, str] = os.environ) -> Options:
    """Read the options this process runs with.

    Raises:
        OptionError: a value is out of range (names the flag, the variable and the range), or a
            variable with our prefix is none of ours.
    """
    known = [*map(env_name, Options.model_fields), *OTHER_VARIABLES]
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in known:
            raise OptionError(
                f"environment variable {name} is not a LibraSpec option; "
                f"{_nearest(name, known)}; unset it"
            )
    given = {
        field: environ[env_name(field)]
        for field in Options.model_fields
        if environ.get(env_name(field), "") != ""
    }
    return _validated(Options, given, lambda f: f"{flag_name(f)} (or {env_name(f)})")


def configure(**options: Any) -> Options:
    """Set options from Python, for engines created afterwards in this process.

    ``configure(alpha=1.8)`` sets one, ``configure(alpha=None)`` returns it to its default.

    Returns:
        The options now in force.

    Raises:
        OptionError: unknown name or value out of range; nothing is changed then.
    """
    unknown = sorted(set(options) - set(Options.model_fields))
    if unknown:
        raise OptionError(
            f"unknown LibraSpec option(s) {', '.join(unknown)}; known: "
            f"{', '.join(Options.model_fields)}"
        )
    environ = dict(os.environ)
    for field, value in options.items():
        if "\0" in str(value):
            raise OptionError(f"{field} = {value!r}: a NUL character cannot be passed on")
        if value is None:
            environ.pop(env_name(field), None)
        else:
            environ[env_name(field)] = str(value)
    loaded = load(environ)
    for field in options:
        name = env_name(field)
        if name in environ:
            os.environ[name] = environ[name]
        else:
            os.environ.pop(name, None)
    return loaded


def add_cli_flags(parser: argparse.ArgumentParser) -> None:
    """Add the ``--libraspec-*`` flags to SGLang's parser (idempotent)."""
    if flag_name("policy") in parser._option_string_actions:
        return
    group = parser.add_argument_group(
        "LibraSpec", "Options of --speculative-algorithm LIBRASPEC (libraspec-sglang)."
    )
    for field, info in Options.model_fields.items():
        choices = getattr(info.annotation, "__args__", None) if field in _CHOICES else None
        default = "" if info.default is None else f" Default: {info.default}."
        group.add_argument(
            flag_name(field),
            dest=_dest(field),
            default=None,
            choices=choices,
            metavar=None if choices else field.upper(),
            help=(info.description + default).replace("%", "%%"),
        )


def check_cli_flags(arguments: Sequence[str]) -> None:
    """Find at once what SGLang's parser would find after a minute of imports.

    Args:
        arguments: of a server's command line; flags that are not ours pass.

    Raises:
        OptionError: an unknown ``--libraspec-`` flag, or a value out of range.
    """
    parser = argparse.ArgumentParser(
        prog="libraspec", usage=argparse.SUPPRESS, add_help=False, exit_on_error=False
    )
    add_cli_flags(parser)
    try:
        found, others = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise OptionError(str(error)) from None
    known = [flag_name(field) for field in Options.model_fields]
    for argument in others:
        if argument.startswith(FLAG_PREFIX):
            name = argument.split("=", 1)[0]
            raise OptionError(f"{name} is not a LibraSpec option; {_nearest(name, known)}")
    given = {env_name(field): getattr(found, _dest(field)) for field in Options.model_fields}
    load({**os.environ, **{name: str(v) for name, v in given.items() if v is not None}})


def take_cli_flags(args: argparse.Namespace) -> None:
    """Put the flags the user gave into force.

    Raises:
        OptionError: a value is out of range.
    """
    given = {field: getattr(args, _dest(field), None) for field in Options.model_fields}
    configure(**{field: value for field, value in given.items() if value is not None})


def request_options(custom_params: Any) -> RequestOptions:
    """A request's own options; keys without our prefix belong to others and are ignored.

    Raises:
        OptionError: an unknown ``libraspec_`` key or a value out of range.
    """
    if not isinstance(custom_params, Mapping):
        return _NO_REQUEST_OPTIONS
    given = {
        key.removeprefix(REQUEST_PREFIX): value
        for key, value in custom_params.items()
        if isinstance(key, str) and key.startswith(REQUEST_PREFIX)
    }
    if not given:
        return _NO_REQUEST_OPTIONS
    return _validated(RequestOptions, given, lambda f: f"custom_params['{REQUEST_PREFIX}{f}']")


_CHOICES = ("policy", "extension", "graphs")
_NO_REQUEST_OPTIONS = RequestOptions()


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}" if near else f"known: {', '.join(known)}"


def _dest(field: str) -> str:
    return REQUEST_PREFIX + field


def _validated(model: type[BaseModel], given: Mapping[str, Any], spell) -> Any:
    try:
        return model(**given)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        known = ", ".join(spell(name) for name in model.model_fields)
        if first["type"] == "extra_forbidden":
            raise OptionError(f"{spell(field)} is not a LibraSpec option; known: {known}") from None
        raise OptionError(f"{spell(field)} = {_short(first['input'])}: {first['msg']}") from None


def _short(value: Any) -> str:
    """A value as it is told back; a message is no place for a megabyte."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
