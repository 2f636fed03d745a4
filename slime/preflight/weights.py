"""Checks a Hugging Face folder without loading it: the headers of its weights against config.json, a
sample of the numbers, and its tokenizer against the vocabulary.

Reading a header costs milliseconds, so a model of any size is checked before anything starts.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from slime.exceptions import ConfigError
from slime.models.families import is_derived_tensor
from slime.models.safetensors_header import (
    INDEX,
    TensorEntry,
    has_bad_number,
    read_header,
    read_weight_map,
    weight_files,
)
from slime.models.shape import ModelShape
from slime.models.weight_shapes import MAX_TENSORS, TIED_HEAD, count_tensors, expected_tensors
from slime.typing import Tokenizer

READABLE = ("F32", "BF16", "F16")
SHOWN = 3
TOKENIZER_CONFIG = "tokenizer_config.json"
# Of each tensor's numbers the first are looked at: all of a norm's, some of a matrix's.
SAMPLE_BYTES = 1 << 14
SAMPLE_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class WeightsReport:
    """problems: what is wrong, as sentences. num_tensors, num_files, num_bytes: what was found;
    num_sampled: tensors in which numbers were looked at.
    """

    problems: list[str]
    num_tensors: int = 0
    num_files: int = 0
    num_bytes: int = 0
    num_sampled: int = 0


def check_weights(folder: str | Path, shape: ModelShape) -> WeightsReport:
    """Holds the folder's weights against what its config.json describes."""
    folder = Path(folder)
    if count_tensors(shape) > MAX_TENSORS:
        return WeightsReport(
            [
                f"{folder / 'config.json'} describes {count_tensors(shape)} tensors; at most "
                f"{MAX_TENSORS} are looked at."
            ]
        )
    problems, entries, files = [], [], []
    try:
        files = weight_files(folder)
    except ConfigError as error:
        return WeightsReport([str(error)])
    for path in files:
        try:
            entries += read_header(path)
        except (ConfigError, OSError) as error:
            problems.append(str(error))
    if not problems:
        problems += _name_problems(folder, shape, entries)
    num_sampled, bad = _sample(entries)
    if bad:
        problems.append(f"{_listed(bad)}: NaN or infinite numbers. Download the folder again.")
    num_bytes = sum(entry.stop - entry.start for entry in entries)
    return WeightsReport(problems, len(entries), len(files), num_bytes, num_sampled)


def _name_problems(folder: Path, shape: ModelShape, entries: list[TensorEntry]) -> list[str]:
    expected = dict(expected_tensors(shape))
    found: dict[str, TensorEntry] = {}
    twice = []
    for entry in entries:
        if is_derived_tensor(entry.name):
            continue
        if entry.name in found:
            twice.append(f"{entry.name} in {found[entry.name].path.name} and {entry.path.name}")
        found[entry.name] = entry
    optional = {TIED_HEAD} if shape.tie_word_embeddings else set()
    missing = [name for name in expected if name not in found and name not in optional]
    unknown = [name for name in found if name not in expected]
    reshaped = [
        f"{name} has {list(found[name].shape)}, the model's is {list(size)}"
        for name, size in expected.items()
        if name in found and found[name].shape != size
    ]
    unreadable = [
        f"{name} is {entry.dtype}" for name, entry in found.items() if entry.dtype not in READABLE
    ]
    misplaced = [
        name
        for name, file in (read_weight_map(folder) or {}).items()
        if name not in found or found[name].path.name != Path(file).name
    ]
    return [
        f"{sentence}: {_listed(names)}. {remedy}"
        for names, sentence, remedy in (
            (missing, f"{len(missing)} tensors are missing", _ANOTHER),
            (unknown, f"{len(unknown)} tensors are none of this model's", _ANOTHER),
            (reshaped, f"{len(reshaped)} tensors have another shape", _ANOTHER),
            (
                unreadable,
                f"{len(unreadable)} tensors have a type that is not read",
                f"Convert the weights to {', '.join(READABLE)}.",
            ),
            (
                twice,
                f"{len(twice)} tensors stand in two files",
                "Remove the files of another save.",
            ),
            (
                misplaced,
                f"{INDEX} leads to files without {len(misplaced)} tensors",
                "Download the folder again.",
            ),
        )
        if names
    ]


_ANOTHER = "The weights are of another model than config.json; download the folder again."


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _sample(entries: Iterable[TensorEntry]) -> tuple[int, list[str]]:
    """(tensors looked at, those of them with a NaN or an infinity), the small ones first, within
    SAMPLE_SECONDS.
    """
    deadline = time.monotonic() + SAMPLE_SECONDS
    bad, number = [], 0
    for entry in sorted(entries, key=lambda entry: entry.stop - entry.start):
        if time.monotonic() > deadline:
            break
        size = min(SAMPLE_BYTES, entry.stop - entry.start)
        try:
            with entry.path.open("rb") as file:
                file.seek(entry.start)
                data = file.read(size)
        except OSError as error:
            bad.append(f"{entry.name} ({error})")
            continue
        number += 1
        if has_bad_number(entry.dtype, data):
            bad.append(entry.name)
    return number, bad


def tokenizer_problem(tokenizer: Tokenizer, shape: ModelShape, folder: str | Path) -> str | None:
    """Why the tokenizer does not fit the model: a file is missing, it has no tokens but its marks,
    or ids beyond the embedding.
    """
    if not (Path(folder) / TOKENIZER_CONFIG).exists():
        return (
            f"{folder} has no {TOKENIZER_CONFIG}: which tokenizer its files are for, its marks and "
            "its chat template would be guessed. Download the folder again."
        )
    vocabulary = tokenizer.get_vocab()
    special = set(getattr(tokenizer, "all_special_tokens", ()))
    if not set(vocabulary) - special:
        return (
            f"the tokenizer of {folder} has no tokens but its {len(vocabulary)} special ones. Its "
            "tokenizer.json (or vocabulary file) is missing; download the folder again."
        )
    last, token = max((number, text) for text, number in vocabulary.items())
    if last >= shape.vocab_size:
        return (
            f"the tokenizer of {folder} has the token {token!r} with id {last}, the model has "
            f"{shape.vocab_size} (vocab_size in config.json). Take the model's own tokenizer."
        )
    return None
