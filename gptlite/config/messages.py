"""Conversion of Hydra's and OmegaConf's errors to one line that names the key, the value and the fix."""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from gptlite.config import other_tools
from gptlite.config.keys import choices, known_keys
from gptlite.config.overrides import hydra_value
from gptlite.config.schema import RENAMED, SCHEMAS
from gptlite.errors import ConfigError, did_you_mean
from gptlite.models.registry import SPECS

PLUGGABLE = ("model", "data", "optimizer")  # groups to which plugins add presets


@contextmanager
def refusals() -> Iterator[None]:
    """Context manager that converts exceptions of Hydra and OmegaConf to ConfigError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, OverflowError) as error:  # the last of an integer as a float
        raise ConfigError(explain(error)) from None  # a chained traceback of Hydra's would hide the message


def explain(error: BaseException) -> str:
    """Return a one-line message for an exception that was raised while composing a configuration."""
    chain = [error]  # Hydra wraps OmegaConf's error, which names the key
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    text = "\n".join(str(item) for item in chain)
    if isinstance(error, MissingConfigException):
        return _missing_preset(error)
    for pattern in (r"Could not override '([^']+)'", r"Key '[^']+' not in[\s\S]*?full_key: (\S+)"):
        if match := re.search(pattern, text):
            return unknown_key(match[1])
    lacks, where = (re.search(pattern, text) for pattern in (r"key 'model\.(\w+)' not found", r"full_key: (\S+)"))
    if lacks and where:
        other = "choose another data= if the model reads samples, or " if where[1] == "data.sequence_length" else ""
        return f"{where[1]} defaults to model.{lacks[1]}, which this model does not have; {other}give {where[1]}=..."
    for item in chain:
        if match := re.search(r"full_key: (\S+)", str(item)):
            fix = (
                "; in a file, write elastic: true" if match[1] == "parallelism.data" and "elastic" in str(item) else ""
            )
            return f"{match[1]}: {plain(str(item).splitlines()[0])}{fix}"
    if isinstance(error, OverrideParseException):
        if "=" not in error.override:
            return f"{error.override} is not KEY=VALUE; --help lists the keys"
        key, _, value = error.override.partition("=")
        word = f"{key}={hydra_value(value)}"
        quoted = f'"{word}"' if re.fullmatch(r"[^\"$`\\!]*", word) else shlex.quote(word)
        return f"{error.override} cannot be parsed; quote special characters for Hydra and the shell: {quoted}"
    if "Ambiguous value" in text:
        return f"{str(error).splitlines()[0]}: use --multirun (-m) for several values, or quote a single one"
    return str(error).splitlines()[0]


def plain(line: str) -> str:
    """Return a plain message for OmegaConf's error about a value's type. Other errors are returned unchanged."""
    if kind := re.match(r"Invalid value assigned: (\w+) is not a ListConfig", line):
        return f"{kind[1]} is not a list; give one in brackets, e.g. [4,4]"
    if line.startswith("Cannot merge DictConfig with ListConfig"):
        return "a list is given in brackets, e.g. [4,4], and the keys of a section are set one by one"
    if section := re.match(r"Invalid type assigned: .*Config. value: (.*)", line):
        return f"{section[1]} is not a section of keys; set one of its keys instead"
    if text := re.match(r"Cannot convert '(?:list|dict)' to string: '(.*)'", line):
        return f"{text[1]} is not a text; quote it if it is meant literally"
    if choice := re.match(r"Value (.*) \((?:list|dict)\) is not a valid input for <enum", line):
        return f"{choice[1]} is not one of its values; --help lists them"
    found = re.match(r"Value '(.*)' (?:of type '\w+' could not be converted to|is not a valid) (\w+)", line)
    kinds = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
    return f"{found[1]} is not {kinds[found[2]]}" if found and found[2] in kinds else line


def unknown_key(key: str) -> str:
    """Return the message for a key that the configuration does not have."""
    if key == "sweep":
        return "sweep is not a section of a run; add a sweep preset with +, e.g. +sweep=parallelism"
    section, _, name = key.partition(".")
    if renamed := [spec.renamed[name] for spec in SPECS if section == "model" and name in spec.renamed]:
        return f"{key} is now model.{renamed[0]}"
    if name in RENAMED.get(section, {}):
        return f"{key} is now {section}.{RENAMED[section][name]}"
    keys, other = known_keys(), other_tools.hint(key)
    if key in keys:
        return f"{key} is not a key of the chosen preset; another preset of {section} has it"
    if section in SCHEMAS and name in ("name", "type", "kind", "preset"):  # keys of other frameworks for a choice
        return f"{key} is not a key; {choices(section)}"
    if name.lower() in other_tools.WAYS or (not name and key.lower() in other_tools.WAYS):
        return f"{key} is not a key; {other}"
    inside = [known.partition(".")[2] for known in keys if known.startswith(f"{section}.")]
    leaves = [known for known in keys if known.split(".")[-1] == key.split(".")[-1]]
    if leaves:
        return f"{key} is not a key; did you mean {min(leaves, key=lambda each: not each.startswith(f'{section}.'))}?"
    if other:
        return f"{key} is not a key; {other}"
    if inside and name:  # the section's name, common to its keys, is not compared
        close = get_close_matches(name, inside, n=1)
        return f"{key} is not a key; {f'did you mean {section}.{close[0]}?' if close else '--help lists them'}"
    return f"{key} is not a key{did_you_mean(key, keys) or '; --help lists them'}"


def flag_refusal(flag: str, value: str | None = None) -> str | None:
    """Return the message for a flag of another tool, such as `--lr=3e-4`, or `--lr` with the next word as `value`; None
    if the flag is unknown."""
    word, equals, own = flag.lstrip("-").partition("=")
    word, value = word.replace("-", "_"), own if equals else value
    word = {"-cp": "config_path", "-cn": "config_name"}.get(flag, word)  # Hydra's
    leaves = [key for key in known_keys() if key.split(".")[-1] == word]
    if word in (*SCHEMAS, "experiment"):
        advice = f"give {word}={value or 'PRESET'}"
    elif word in known_keys() or len(leaves) == 1:
        advice = f"give {leaves[0] if len(leaves) == 1 else word}={value or 'VALUE'}"
    elif "." in word or leaves:
        advice = unknown_key(word)
    elif word.lower() in other_tools.KEYS:
        advice = f"give {other_tools.KEYS[word.lower()]}={value or 'VALUE'}"
    else:
        return f"{flag}: {way}" if (way := other_tools.hint(word)) else None
    return f"{flag}: settings are KEY=VALUE, without dashes; {advice}"


def _missing_preset(error: MissingConfigException) -> str:
    file = error.missing_cfg_file or ""
    group, _, name = file.partition("/") if file.partition("/")[0] in SCHEMAS else file.rpartition("/")
    options = [option for option in error.options or () if not option.endswith("_schema")]  # schemas are not presets
    longer = [option for option in options if name and option.startswith(name)]
    # A lower cutoff would match tp3 with tp8.
    close = longer[:3] or get_close_matches(name.lower(), options, n=1, cutoff=0.75)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    if not options:
        return str(error).splitlines()[0]
    if group == "data" and ("/" in name or Path(name).exists()):
        key = "data=tokens" if (Path(name) / "train.idx").exists() else "data=text"
        absent = "" if Path(name).expanduser().exists() else " that does not exist"
        once = " once it holds texts" if absent else ""
        given = f"{key} data.path={hydra_value(name)}"
        return f"data={name} is a path{absent}, but data= takes a preset; give {given}{once}"
    if group == "hydra/launcher" and (plugin := name.partition("_")[0]) in ("joblib", "submitit"):
        hint = f"pip install hydra-{plugin}-launcher, or "
    missing = "does not exist" if group != "data" else f"is neither a preset nor a prepared folder ./data/{name}"
    missed = "; if a plugin registers it, add plugins=[MODULE]" if not hint and group in PLUGGABLE else ""
    return f"{group}={name} {missing}; {hint}the choices are {', '.join(options)}{missed}"
