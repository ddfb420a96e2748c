"""Reading of config.json. Every key is read, has one supported value, or is in a list of ignored keys; others are
refused, since they might change the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, ClassVar

from gptlite.documents import shown
from gptlite.errors import ConfigError, did_you_mean
from gptlite.limits import LAYERS, SIZE, VOCABULARY

# Largest values of keys with another limit than SIZE.
MOST = {"n_layer": LAYERS, "n_layers": LAYERS, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
# Keys without effect on the logits, in every class.
IGNORED = frozenset(
    # about the file, its tokenizer and the class that reads it
    "architectures model_type transformers_version name_or_path dtype torch_dtype tokenizer_class prefix "
    "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id mask_token_id decoder_start_token_id "
    "attn_implementation experts_implementation transformers.js_config is_llama_config unsloth_version unsloth_fixed "
    # what a call returns, and how it computes
    "return_dict use_return_dict output_hidden_states output_attentions output_past output_router_logits use_cache "
    "chunk_size_feed_forward gradient_checkpointing torchscript use_bfloat16 "
    # heads of classifiers, and losses that are added in training
    "id2label label2id num_labels problem_type finetuning_task task_specific_params router_aux_loss_coef "
    # generation
    "assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty "
    "do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff "
    "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length "
    "max_new_tokens no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams "
    "num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate "
    "suppress_tokens target_lookbehind temperature top_k top_p typical_p".split()
)


class Keys:
    """Keys of a class's config.json.

    `defaults`: the keys that are read, with the values that transformers uses if they are missing. `fixed`: keys that
    change the model, each with its only supported value, which is also transformers' default. `aliases`: `{other name:
    key}`. `ignored`: keys without effect on the logits, besides those in IGNORED.
    """

    defaults: ClassVar[dict[str, Any]] = {}
    fixed: ClassVar[dict[str, Any]] = {}
    aliases: ClassVar[dict[str, str]] = {}
    ignored: Sequence[str] = ()

    @classmethod
    def read(cls, content: Mapping[str, Any], title: str) -> dict[str, Any]:
        """Return the content of a config.json, with default values for missing keys. Raises ConfigError, naming the
        key, for a key that might change the model and is not supported. `title`: the model's name."""
        values = dict(content)
        for alias, key in cls.aliases.items():
            if alias in values:
                value = values.pop(alias)
                if values.setdefault(key, value) != value:
                    both = f"{alias}={shown(value)} and {key}={shown(values[key])}"
                    raise ConfigError(f"config.json: {both} differ; keep one of them")
        known = {*cls.defaults, *cls.fixed, *cls.aliases, *cls.ignored, *IGNORED}
        for key, value in values.items():
            # Keys with an underscore are private to transformers' configuration object.
            if key not in known and value is not None and not key.startswith("_"):
                hint = did_you_mean(key, known)
                fix = hint or "; remove it if the weights do not depend on it"
                raise ConfigError(f"config.json: {key}={shown(value)} is not a key of {title}{fix}")
        for key, value in cls.fixed.items():
            given = values.get(key, value)
            if given != value and (given or value):  # null, {}, [] and false all turn the key off
                raise ConfigError(f"config.json: {key}={shown(given)}: only {key}={shown(value)} can be imported")
        return {**cls.defaults, **values}


def flag(content: Mapping[str, Any], key: str) -> bool:
    """Return a bool of config.json. Raises ConfigError, naming the key, for another value."""
    found = content[key]
    if not isinstance(found, bool):
        raise ConfigError(f"config.json: {key}={shown(found)} must be true or false")
    return found


def whole(content: Mapping[str, Any], key: str, file: str = "config.json") -> int:
    """Return a positive integer from config.json, or another file. Raises ConfigError, naming the key, for any other
    value."""
    value, most = content.get(key), MOST.get(key, SIZE)
    if type(value) is not int or not 1 <= value <= most:  # a bool is an int too
        raise ConfigError(f"{file}: {key}={shown(value)} must be a whole number from 1 to {most:,}")
    return value


def number(content: Mapping[str, Any], key: str, below: float = float("inf"), file: str = "config.json") -> float:
    """Return a number from config.json, or another file: at least 0 and less than `below`. Raises ConfigError, naming
    the key, for any other value."""
    value: Any = content.get(key)
    if type(value) not in (int, float) or abs(value) > 1e300 or not 0 <= value < below:
        limit = f" and below {below:g}" if isfinite(below) else ""
        raise ConfigError(f"{file}: {key}={shown(value)} must be a finite number of at least 0{limit}")
    return float(value)
