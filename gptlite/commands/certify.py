"""Certify a layout before GPUs are rented: reduce it to this machine's CPU, and check it there in four stages.

gptlite certify [any KEY=VALUE of train] [cluster.nodes=N] [out=FOLDER]
gptlite certify verify PATH [KEY=VALUE of train]    is a certificate intact, and does it cover this configuration?
gptlite certify fuzz [...]                          check random configurations; see `gptlite certify fuzz --help`

types: the types of all collectives at the true number of ranks. parity: the first
steps of reduced layouts and of one process are the same. resume: a run is killed twice, and goes on to the bit, then
on other layouts. state: its checkpoint has each element of the training state once. A parity that fails names the layer
and the axis. certificate.json and certificate.html are written to FOLDER, by default certificates/NAME. In a folder
with certificates/, train names the certificate that covers its run, or says what differs.

The number of ranks is that of the layout or, if parallelism.data is not set, that of cluster=PRESET and cluster.nodes.
Exit codes: 0 certified, 1 a stage failed, 2 refused.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gptlite.commands.plan import separated
from gptlite.commands.train import run_command
from gptlite.config.compose import load
from gptlite.config.overrides import key_of
from gptlite.config.schema import Config
from gptlite.errors import ConfigError, printable
from gptlite.files import unwritable
from gptlite.launch.starter import starter
from gptlite.parallelism.layout import wanted_world
from gptlite.progress import log
from gptlite.satellites.deepspeed import with_deepspeed


@dataclass
class Arguments:
    """Command-line arguments of certify, in addition to train's."""

    out: str = ""


def main() -> NoReturn:
    """Run the command line and exit."""
    usage = __doc__
    if sys.argv[1:2] == ["fuzz"]:
        from gptlite.satellites.certify.fuzz import command

        usage = command.__doc__
    run_command(run, usage)


def run(arguments: list[str]) -> int:
    """Certify, verify or fuzz, and return the exit code. Raises ConfigError."""
    if outer := starter():
        raise ConfigError(f"certify starts the ranks itself; run it as a single process, without {outer.name}")
    command = arguments.pop(0) if arguments and "=" not in arguments[0] else ""
    if command == "fuzz":
        from gptlite.satellites.certify.fuzz.command import run as fuzz

        return fuzz(arguments)
    if command == "verify":
        return verify(arguments)
    if command:
        raise ConfigError(f"{command} is neither verify, nor fuzz, nor KEY=VALUE")
    own, overrides = separated(Arguments, arguments)
    return certify(own, configured(overrides))


def configured(overrides: list[str]) -> Config:
    """Return train's configuration for these arguments. Raises ConfigError if the layout is to be chosen."""
    overrides = with_deepspeed(overrides)
    config = load(overrides)
    config.run.overrides = overrides
    if config.parallelism.auto:
        raise ConfigError("parallelism=auto chooses a layout; certify the one that `gptlite plan` prints")
    if config.parallelism.elastic:
        raise ConfigError("parallelism.elastic=true has a layout for each number of ranks; certify each, e.g. with "
                          "parallelism.elastic=false parallelism.data=4")  # fmt: skip
    return config


def world_of(config: Config) -> int:
    """Return the number of ranks of a configuration. Raises ConfigError if it is 1, or not that of the cluster."""
    cluster = config.cluster
    given = any(key_of(each).startswith("cluster") for each in config.run.overrides)
    size = (cluster.nodes or 1) * cluster.devices_per_node if given and cluster.devices_per_node else None
    asked = {key_of(each) for each in config.run.overrides} & {"cluster.devices_per_node", "cluster"}
    if size is None and given:
        size = (cluster.nodes or 1) * 8  # a usual node, as cluster=local takes this machine's
    world = wanted_world(config.parallelism, gpus=0)
    if size is not None and config.parallelism.data is None:
        world = size
    elif size is not None and size != world:
        devices = size // (cluster.nodes or 1)
        raise ConfigError(
            f"cluster.nodes={cluster.nodes} x {devices} devices = {size} ranks, but the layout has {world}; "
            + ("correct one of them" if asked else "correct one of them, or give cluster.devices_per_node")
        )
    if world == 1:
        raise ConfigError("the layout has only one rank; give one with several, e.g. parallelism=tp2")
    return world


def certify(own: Arguments, config: Config) -> int:
    """Run all stages, and write the certificate. Return the exit code."""
    world = world_of(config)
    from gptlite.satellites.certify.certificate import FOLDER
    from gptlite.satellites.certify.page import write_page
    from gptlite.satellites.certify.stages import certify as run_stages
    from gptlite.satellites.certify.stages import name_of

    folder = Path(own.out).expanduser() if own.out else Path(FOLDER) / name_of(config, world)
    if reason := unwritable(folder, "out"):
        raise ConfigError(f"out={folder}: {reason}")
    certificate = run_stages(config, world, lambda line: print(printable(line, "\n"), flush=True), log)
    file, page = certificate.write(folder), write_page(certificate, folder)
    print("not covered:", *(f"  {line}" for line in certificate.uncovered), sep="\n")
    print(printable(f"-> {file}, {page}"))
    return 0 if certificate.passed else 1


def verify(arguments: list[str]) -> int:
    """Print whether a certificate is intact and covers a configuration. Return the exit code."""
    if not arguments or "=" in arguments[0]:
        raise ConfigError("certify verify takes the path of a certificate, and KEY=VALUE of train")
    from gptlite.satellites.certify.certificate import read

    path, *overrides = arguments
    certificate = read(Path(path).expanduser())
    stages = ", ".join(
        f"{row['stage']} {'not checked' if row['passed'] is None else 'ok' if row['passed'] else 'FAILED'}"
        for row in certificate.rows
    )
    print(printable(f"{certificate.model}, {certificate.layout}: {certificate.world_size:,} ranks; {stages}"))
    if not overrides:
        return 0 if certificate.passed else 1
    config = configured(overrides)
    from gptlite.satellites.certify.match import differences

    reasons = list(differences(certificate, config, world_of(config)))
    for reason in reasons:
        print(printable(f"different: {reason}"))
    print("it does not cover this configuration" if reasons else "it covers this configuration")
    return 1 if reasons else 0
