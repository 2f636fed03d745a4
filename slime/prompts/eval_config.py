"""Reads the configuration of evaluation datasets. A value is the dataset's own, else the file's
default, else the command line's, else the rollout's.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from slime.config.ranges import range_problem
from slime.config.regular_files import read_regular
from slime.config.specs import specs_by_name
from slime.exceptions import ConfigError

# Field -> the options that it falls back to, in this order.
_FROM_ARGS = {
    "rm_type": ("rm_type",),
    "custom_rm_path": ("custom_rm_path",),
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "multimodal_keys": ("multimodal_keys",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt",),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "min_new_tokens": ("eval_min_new_tokens",),
    "skip_special_tokens": ("rollout_skip_special_tokens",),
    "custom_generate_function_path": ("custom_generate_function_path",),
}
# Upstream's fields for services that do not exist here: accepted when empty, refused when set.
_UNAVAILABLE = ("app_service", "message_processor", "reward_model", "remote_environment")


# What a YAML file may hold in place of a number. None is not given.
_KINDS: dict[str, type] = {
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty", "eval_task_timeout"), float),
    **dict.fromkeys(
        (
            "top_k",
            "max_response_len",
            "n_samples_per_eval_prompt",
            "min_new_tokens",
            "min_eval_samples",
        ),
        int,
    ),
    **dict.fromkeys(
        (
            "path",
            "rm_type",
            "custom_rm_path",
            "custom_generate_function_path",
            "input_key",
            "label_key",
            "tool_key",
            "metadata_key",
        ),
        str,
    ),
    **dict.fromkeys(("apply_chat_template", "skip_special_tokens", "no_stop_trim"), bool),
}
_KIND_WORDS = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}


def _is_kind(value: object, kind: type) -> bool:
    if value is None or kind is str and isinstance(value, Path):
        return True
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


@dataclasses.dataclass
class EvalDatasetConfig:
    """One evaluation dataset and how it is sampled. None: the engine's default, or not used."""

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str = "input"
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str = "metadata"
    multimodal_keys: dict[str, str] | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    n_samples_per_eval_prompt: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool = False
    no_stop_trim: bool = True
    custom_generate_function_path: str | None = None
    eval_task_timeout: float | None = None
    min_eval_samples: int | None = None
    metadata_overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    app_service: Any = None
    message_processor: Any = None
    reward_model: Any = None
    remote_environment: Any = None
    rm_type_is_fallback: dataclasses.InitVar[bool] = False

    def __post_init__(self, rm_type_is_fallback: bool) -> None:
        self._rm_type_is_fallback = rm_type_is_fallback
        if self.min_eval_samples is not None and self.min_eval_samples <= 0:
            raise ConfigError(
                f"evaluation {self.name!r}: min_eval_samples is {self.min_eval_samples}; it must "
                "be > 0."
            )
        if not isinstance(self.metadata_overrides, dict):
            raise ConfigError(f"evaluation {self.name!r}: metadata_overrides must be a mapping.")
        for field, kind in _KINDS.items():
            if not _is_kind(getattr(self, field), kind):
                raise ConfigError(
                    f"evaluation {self.name!r}: {field} is {getattr(self, field)!r}; it must be "
                    f"{_KIND_WORDS[kind]}."
                )
            # a dataset's number has the range of the option that it stands in for
            for option in _FROM_ARGS.get(field, ())[:1]:
                problem = range_problem(specs_by_name()[option], getattr(self, field))
                if problem is not None:
                    raise ConfigError(f"evaluation {self.name!r}: {field} {problem}")
        for field in _UNAVAILABLE:
            if getattr(self, field) is not None:
                raise ConfigError(
                    f"evaluation {self.name!r}: {field} is not available here; remove it."
                )

    @property
    def cache_key(self) -> tuple:
        """What decides the dataset's samples as they are read; equal keys share them."""
        keys = (
            self.name,
            self.path,
            self.input_key,
            self.label_key,
            self.tool_key,
            self.metadata_key,
        )
        media = tuple(sorted((self.multimodal_keys or {}).items()))
        return (
            *keys,
            media,
            self.apply_chat_template,
            repr(sorted(self.apply_chat_template_kwargs.items())),
        )

    def inject_metadata(self, metadata: dict | None) -> dict[str, Any]:
        """A new dict: the row's metadata with a reward type, then this dataset's overrides.

        A type that the evaluation's configuration names replaces the row's own; --rm-type is for
        rows without one, as in training.
        """
        merged = dict(metadata or {})
        if self.rm_type is not None and not (self._rm_type_is_fallback and merged.get("rm_type")):
            merged["rm_type"] = self.rm_type
        merged.update(self.metadata_overrides)
        return merged


FIELD_NAMES = frozenset(field.name for field in dataclasses.fields(EvalDatasetConfig))


def ensure_dataset_list(config: Any) -> list[dict[str, Any]]:
    """Dataset entries as a list of dicts with a name. None is empty; a dict maps names to entries
    (or paths).
    """
    if config is None:
        return []
    if isinstance(config, dict):
        config = [
            {**({"path": entry} if isinstance(entry, str) else dict(entry or {})), "name": name}
            for name, entry in config.items()
        ]
    if not isinstance(config, list | tuple):
        raise TypeError(f"eval.datasets must be a list or a mapping, got {type(config).__name__}")
    for entry in config:
        if not isinstance(entry, dict):
            raise TypeError(
                f"an entry of eval.datasets must be a mapping, got {type(entry).__name__}: "
                f"{entry!r}"
            )
        if not entry.get("name"):
            raise ConfigError(f"an entry of eval.datasets has no name: {entry!r}")
    return [dict(entry) for entry in config]


def build_eval_dataset_configs(
    args: argparse.Namespace, raw_config: object, defaults: dict[str, Any] | None = None
) -> list[EvalDatasetConfig]:
    """The datasets of a configuration: each entry, then `defaults`, then args (eval_* before
    rollout_*).

    ConfigError names unknown keys and entries without a path. Options that `args` does not have
    count as not given.
    """
    defaults = dict(defaults or {})
    _refuse_unknown(defaults, "eval.defaults")
    return [_build(args, entry, defaults) for entry in ensure_dataset_list(raw_config)]


def _build(
    args: argparse.Namespace, entry: dict[str, Any], defaults: dict[str, Any]
) -> EvalDatasetConfig:
    _refuse_unknown(entry, f"evaluation {entry['name']!r}")
    values = {name: value for name in _FROM_ARGS if (value := _from_args(args, name)) is not None}
    values.update((name, value) for name, value in defaults.items() if value is not None)
    values.update((name, value) for name, value in entry.items() if value is not None)
    if not values.get("path"):
        raise ConfigError(f"evaluation {entry['name']!r} has no path.")
    is_fallback = entry.get("rm_type") is None and defaults.get("rm_type") is None
    return EvalDatasetConfig(**values, rm_type_is_fallback=is_fallback)


def _from_args(args: argparse.Namespace, field: str) -> Any:
    return next(
        (value for name in _FROM_ARGS[field] if (value := getattr(args, name, None)) is not None),
        None,
    )


def _refuse_unknown(entry: dict[str, Any], where: str) -> None:
    unknown = sorted(set(entry) - FIELD_NAMES)
    if unknown:
        raise ConfigError(f"{where} has unknown keys {unknown}; known are {sorted(FIELD_NAMES)}.")


def eval_datasets_of(args: argparse.Namespace) -> list[EvalDatasetConfig]:
    """The datasets of --eval-config, else of --eval-prompt-data (NAME PATH pairs; one PATH alone is
    named eval).
    """
    if args.eval_config:
        return _from_yaml(args)
    pairs = args.eval_prompt_data or []
    if len(pairs) == 1:
        pairs = ["eval", *pairs]
    if len(pairs) % 2:
        raise ConfigError(
            f"--eval-prompt-data takes pairs NAME PATH, got {len(pairs)} values: {pairs}."
        )
    entries = [
        {"name": name, "path": path} for name, path in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    return build_eval_dataset_configs(args, entries, {})


def _from_yaml(args: argparse.Namespace) -> list[EvalDatasetConfig]:
    import yaml

    path = Path(args.eval_config)
    try:
        content = yaml.safe_load(read_regular(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--eval-config {str(path)!r} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--eval-config {str(path)!r} is not valid YAML: {error}") from error
    section = content.get("eval", content) if isinstance(content, dict) else None
    if not isinstance(section, dict) or not section.get("datasets"):
        raise ConfigError(f"--eval-config {str(path)!r} has no eval.datasets.")
    return build_eval_dataset_configs(args, section["datasets"], section.get("defaults"))
