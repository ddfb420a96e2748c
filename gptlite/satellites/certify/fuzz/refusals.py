"""Refusals as they should be: one line that names a key, its value and a fix, and a fix that mends what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gptlite.satellites.certify.fuzz.legal import has_key, refusal

MOST_FIXES = 30  # that a configuration with several faults needs, one after the other
VALUE = r"\[[^\]]*\]|[^\s,;:()]*[^\s,;:().]"
PAIR = re.compile(rf"(?<![\w.])([a-z_]+(?:\.[a-z_0-9]+)*)(?:=| can be )({VALUE})")
NUMBERS = re.compile(r"(?:, \d+)*(?:,? or \d+)?")
WORDS = re.compile(r"(?:, \w+)*,? or (?:\w+)(?![\w.=])|")
LEFT_OUT = re.compile(r"leave (?:it|the key) out|leave out (?:the key|([a-z_]+(?:\.[a-z_0-9]+)+))")
Option = tuple[str, ...]  # overrides that are one fix; KEY~ leaves a key out


def complaint(values: Sequence[str]) -> str:
    """Return what is wrong with the refusal of a configuration, given as all of its overrides; empty if nothing is.

    Each fix that the message gives must mend what it refuses, and by some of the fixes, one after the other, a
    configuration with several faults must become legal.
    """
    states, seen = [list(values)], set[str]()
    while states:
        values = states.pop()
        try:
            message = refusal(values)
        except Exception as error:  # a fault of the checks, whatever it is
            return f"the checks raised {type(error).__name__}: {error}"
        if not message:
            return ""
        if message in seen:
            continue
        if len(seen) == MOST_FIXES:
            return f"{MOST_FIXES} fixes, one after the other, do not make it legal: {message}"
        seen.add(message)
        if lacking := wrong_form(message, values):
            return f"{lacking}: {message}"
        options = list(fixes(message))
        if not options:
            return ""  # in words alone, such as `use a larger first size`
        after = [applied(values, option) for option in options]
        for option, changed in zip(options, after, strict=True):
            if cause(refusal(changed)) == cause(message):
                return f"{' '.join(option)} does not mend it: {message}"
        states += reversed(after)
    return f"the fixes lead from one refusal to the other: {message}"


def cause(message: str) -> str:
    """Return a message without its numbers and values, by which refusals are told apart."""
    return re.sub(r"=[^\s,;:)]+|\d+", "#", message.partition("; ")[0])


def wrong_form(message: str, values: Sequence[str]) -> str:
    """Return what a message lacks: one line, a key with its value, and a fix."""
    head, _, fix = message.partition("; ")
    keys = [each.partition("=")[0] for each in values]
    if "\n" in message:
        return "more than one line"
    if not PAIR.search(head):
        return "no key with its value"
    if not any(re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", head) for key in keys):
        return "no key that was given"
    if not fix and not re.search(r"\b(must|needs|use|can be)\b", head):
        return "no fix"
    return ""


def fixes(message: str) -> Iterator[Option]:
    """Yield the fixes that a message gives by their values, each as overrides that belong together."""
    head, _, fix = message.partition("; ")
    first = PAIR.search(head)
    option: list[str] = []
    end = 0
    for match in PAIR.finditer(fix):
        if option and fix[end : match.start()] != " ":
            yield tuple(option)
            option = []
        key, value = match.groups()
        more = (NUMBERS if value.isdigit() else WORDS).match(fix, match.end())
        end = more.end() if more else match.end()
        others = re.findall(r"[\w.]+", more[0]) if more else []
        for other in (each for each in others if each != "or"):
            yield (*option, f"{key}={other}")
        option.append(f"{key}={value}")
    if option:
        yield tuple(option)
    for match in LEFT_OUT.finditer(fix):
        key = match[1] or (first[1] if first else "")
        if key:
            yield (f"{key}~",)


def applied(values: Sequence[str], option: Option) -> list[str]:
    """Return the overrides after a fix. A preset takes the keys with it that it does not have."""
    changed = dict(each.split("=", 1) for each in values)
    for override in option:
        if override.endswith("~"):
            changed.pop(override[:-1], None)
            continue
        key, value = override.split("=", 1)
        changed[key] = value
        if "." not in key:
            idle = [name for name in changed if name.startswith(f"{key}.") and not has_key(key, value, name)]
            changed = {name: changed[name] for name in changed if name not in idle}
    return [f"{key}={value}" for key, value in changed.items()]
