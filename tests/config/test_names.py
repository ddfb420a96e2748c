"""Names with any characters, as values of overrides."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from gptlite.config import hydra_value, load
from gptlite.errors import ConfigError


@pytest.mark.parametrize(
    "text", ["a/b-1.c:d+e@f", "é", "漢/b", "~/a", "a b", "it's", "a\\", "a\u202eb", "a\nb", "$x", "a~b"]
)
def test_a_value_in_an_override_is_read_as_it_was(text: str) -> None:
    assert OverridesParser.create().parse_override(f"run.name={hydra_value(text)}").value() == text


def test_a_name_that_is_not_utf8_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^run\.dir=outputs/\\udce9 is not UTF-8, .*; rename the file or folder$"):
        load(["data=synthetic", "run.dir='outputs/\udce9'"])
