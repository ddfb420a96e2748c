"""Command line parsing: `key=value` options declared in a dataclass, subcommands with paths, errors and exit codes.

A subcommand is a module. Its docstring is the help text, its dataclass `Options` declares the key=value options, and
its function `run(paths, options)` (`run(options)` if it takes no paths) returns the exit code. Only the module of the
subcommand that runs is imported.
"""

import dataclasses
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn, TypeVar

from omegaconf import OmegaConf

from gptlite.config.overrides import escaped, unquoted, whole_number
from gptlite.documents import shown
from gptlite.errors import ConfigError, did_you_mean, known_home, print_failure, print_refusal
from gptlite.invocation import localized, prepare_process
from gptlite.limits import INTEGER

T = TypeVar("T")
LITERAL = {"literal": True}  # metadata of a field whose text may begin and end with quotes


def run_tool(main: Callable[[Any], int | None], schema: type[Any], usage: str | None) -> NoReturn:
    """Run a tool with the arguments of the command line, converted to `schema`, and exit.

    The exit code is the tool's return value (0 for None), 1 after an error of a file or of the program,
    2 after a ConfigError, and 130 after Ctrl-C. `--help` prints `usage`, the tool's docstring, with commands as they
    are typed in this environment.
    """
    prepare_process()
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(localized(usage or "").strip())
        sys.exit(0)
    try:
        with known_home():
            sys.exit(main(parse_arguments(schema, sys.argv[1:])) or 0)
    except ConfigError as error:
        print_refusal(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(pipe_closed())
    except OSError as error:
        print_failure(error)
        sys.exit(1)


def pipe_closed() -> int:
    """Discard further output after the process that reads it, e.g. `head`, closed the pipe. Return the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the flush at exit succeeds
    return 128 + signal.SIGPIPE


@dataclass(frozen=True)
class Subcommand:
    """Subcommand, given by the dotted name of its module and the names of its path arguments.

    If `more` is true, the last path can be repeated.
    """

    module: str
    paths: tuple[str, ...] = ()
    more: bool = False

    @property
    def usage(self) -> str:
        """Description of the paths: `A B`, `PATH ...` or `no paths`."""
        return (" ".join(self.paths) or "no paths") + (" ..." if self.more else "")


def run_subcommand(subcommands: Mapping[str, Subcommand], usage: str) -> NoReturn:
    """Run the command line and exit. Without arguments or with --help, print `usage`."""
    prepare_process()
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(localized(usage))
        sys.exit(0)
    try:
        if name not in subcommands:
            raise ConfigError(f"{name} is not one of {', '.join(subcommands)}{did_you_mean(name, subcommands)}")
        module = import_module(subcommands[name].module)  # after the name is checked: modules may import torch
        if {"-h", "--help"} & set(rest):
            print(localized(module.__doc__ or "").strip())
            sys.exit(0)
        keys = [item.name for item in dataclasses.fields(module.Options)]
        paths, options = separate(name, subcommands[name], rest, keys)
        parse_arguments(module.Options, options)  # reports errors before run_tool; the result is not needed here
    except ConfigError as error:
        print_refusal(error)
        sys.exit(2)
    sys.argv[1:] = options  # run_tool reads them
    run_tool(lambda typed: module.run(*([paths] if subcommands[name].paths else []), typed), module.Options, None)


def separate(name: str, wanted: Subcommand, arguments: list[str], keys: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments into paths and key=value options. Raises ConfigError for a wrong number of paths."""
    # The folders of a sweep have names such as lr=0.1. The argument lr=0.1 is an option, and ./lr=0.1 is a path.
    options = [each for each in arguments if re.match(r"[A-Za-z_]+=", each) or each.startswith("-")]
    paths = [each for each in arguments if each not in options]
    for option in options:
        if option.startswith("-"):
            raise ConfigError(f"{option}: options are key=value{'; the keys are ' if keys else ''}{', '.join(keys)}")
        if not keys:
            raise ConfigError(f"{option}: {name} takes no options, only {wanted.usage}; write a path with = as ./PATH")
    short = len(paths) < len(wanted.paths)
    if short or (len(paths) > len(wanted.paths) and not wanted.more):
        given = f"{len(paths)} path{'s' if len(paths) != 1 else ''} given"
        raise ConfigError(f"{name} takes {wanted.usage}; {given}{': ' if paths else ''}{' '.join(paths)}; see --help")
    return paths, options


def parse_arguments(schema: type[T], arguments: list[str]) -> T:
    """Parse `key=value` arguments into a dataclass. Raises ConfigError for an unknown, invalid or missing key.

    A string may be in Hydra's quotes, as for train, except if its field has `metadata=LITERAL`.
    """
    config = OmegaConf.structured(schema)
    fields = {item.name: item for item in dataclasses.fields(schema)}  # type: ignore[arg-type]
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator:
            first = next((name for name in fields if OmegaConf.is_missing(config, name)), None)
            hint = f"; did you mean {first}={argument}?" if first and not argument.startswith("-") else ""
            raise ConfigError(f"{argument!r} is not key=value{hint}; the keys are {', '.join(fields)}")
        if key not in fields:
            hint = did_you_mean(key, fields)
            raise ConfigError(f"{key} is not a key of this tool{hint}; the keys are {', '.join(fields)}")
        # Strings are taken literally, so that OmegaConf does not parse values such as 1e3, null or [a].
        text = fields[key].type in (str, str | None, "str", "str | None")
        try:
            if text and value[:1] in ("'", '"') and not fields[key].metadata.get("literal"):
                value = unquoted(value)
            if fields[key].type in (int, int | None, "int", "int | None"):
                argument = f"{key}={whole_number(value)}"
            config[key] = escaped(value) if text else OmegaConf.from_dotlist([argument])[key]
        except Exception as error:
            from gptlite.config.messages import plain  # only for an error

            raise ConfigError(f"{argument}: {plain(str(error).splitlines()[0])}") from error
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigError(f"{missing[0]} is not set; give it as {missing[0]}=...")
    for key in fields:
        if not OmegaConf.is_missing(config, key) and type(config[key]) is int and abs(config[key]) > INTEGER:
            raise ConfigError(f"{key} is {shown(config[key])}; give at most {INTEGER:,}")
    return OmegaConf.to_object(config)  # type: ignore[return-value]
