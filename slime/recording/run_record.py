"""`run_0000.json`: the options, versions and code with which a run was started, and what of the
model's folder a replay of the gate reads.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import platform
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from slime import __version__
from slime.config.secrets import is_secret, without_secrets
from slime.config.specs import all_specs
from slime.config.yaml_file import format_resolved
from slime.exceptions import RolloutDataError
from slime.files import atomic
from slime.files.json_values import decode_json, encode_json
from slime.recording import manifest
from slime.recording.writer import FAILURES, clean_up, logger

PACKAGES = ("torch", "megatron-core", "ray", "transformers", "numpy", "tokenizers", "pyarrow")
# what a tokenizer is made of, and the ids that end a response
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
LARGEST_FILE = 64 << 20  # bytes of a tokenizer's file


def begin_recording(args: argparse.Namespace) -> argparse.Namespace:
    """Writes the run's options into --record's folder, once per start of the run. Returns the
    options to go on with: without --record where it could not be begun.
    """
    if args.record is None:
        return args
    root = Path(args.record)
    try:
        root.mkdir(parents=True, exist_ok=True)
        clean_up(root)
        numbers = manifest.run_numbers(root)
        number = numbers[-1] + 1 if numbers else 0
        record = orjson.dumps(run_record(args), option=orjson.OPT_INDENT_2)
        # only the owner may read it: an option's value can be private
        atomic.write_bytes(manifest.run_path(root, number), record, mode=0o600)
        if args.hf_checkpoint is not None:
            _copy_tokenizer(Path(args.hf_checkpoint), root / manifest.TOKENIZER_FOLDER)
    except FAILURES as error:
        logger.warning(
            "the recording in %s could not be begun: %s: %s. Training goes on without it.",
            root,
            type(error).__name__,
            error,
        )
        return argparse.Namespace(**{**vars(args), "record": None})
    return args


def run_record(args: argparse.Namespace) -> dict[str, Any]:
    """The run's options (without secrets), seeds among them, versions and code hash, as JSON has
    them.
    """
    specs = [spec for spec in all_specs() if hasattr(args, spec.name)]
    secrets = {spec.name for spec in specs if spec.is_secret}
    declared = {spec.name for spec in specs}
    options: dict[str, Any] = {}
    shown = argparse.Namespace(**{k: without_secrets(v) for k, v in vars(args).items()})
    for name, value in sorted(vars(args).items()):
        # an attribute of --custom-config-path says by its name alone what it is
        if name in secrets or (name not in declared and is_secret(name, value)):
            continue
        try:
            options[name] = orjson.Fragment(encode_json(getattr(shown, name)))
        except RolloutDataError:  # a function or object of a plug-in
            options[name] = {"not recorded": type(value).__name__}
    return {
        "format": manifest.FORMAT,
        "time": time.time(),
        "command": [
            without_secrets(word.encode("utf-8", "replace").decode())
            for word in _without_secrets(sys.argv[1:], secrets)
        ],
        "options": options,
        "options_yaml": format_resolved(shown, specs),
        "versions": versions(),
        "code": code_hash(),
    }


def _without_secrets(words: list[str], secrets: set[str]) -> list[str]:
    """The command line with the value of every secret flag replaced by ***."""
    flags = {"--" + name.replace("_", "-") for name in secrets} | {f"--{n}" for n in secrets}
    shown, hide = [], False
    for word in words:
        name, has_value, _ = word.partition("=")
        shown.append("***" if hide else f"{name}=***" if name in flags and has_value else word)
        hide = not hide and name in flags and not has_value
    return shown


def versions() -> dict[str, str]:
    """Versions of slime, Python and the packages that compute."""
    found = {"slime": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def code_hash() -> str:
    """blake2b-128 over slime's own Python files, by name: two runs with the same one ran the same
    code of slime.
    """
    root = Path(manifest.__file__).parents[1]
    digest = hashlib.blake2b(digest_size=manifest.HASH_BYTES)
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        path = source / name
        if path.is_file() and path.stat().st_size <= LARGEST_FILE:
            target.mkdir(parents=True, exist_ok=True)
            with atomic.replacing(target / name) as temporary:
                shutil.copyfile(path, temporary)


def options_of(record: Mapping[str, Any]) -> argparse.Namespace:
    """The options of a run record, as the run's `args` had them."""
    return argparse.Namespace(**decode_json(orjson.dumps(record["options"])))
