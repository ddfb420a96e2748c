"""What the command lines in tools/ share: `key=value` arguments, one-line errors, exit codes."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from gptlite.config import parse_arguments
from gptlite.errors import ConfigError
from gptlite.invocation import localized


def run_tool(main: Callable[[Any], int | None], schema: type[Any], usage: str | None) -> NoReturn:
    """Runs a tool with its typed arguments and exits: 0 or what it returns, 1 disk, 2 refused, 130 after Ctrl-C.

    `--help` prints `usage`, the tool's docstring, with commands as they are written here.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(localized(usage or "").strip())
        sys.exit(0)
    try:
        sys.exit(main(parse_arguments(schema, sys.argv[1:])) or 0)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the flush at exit
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:  # what the disk refuses
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
