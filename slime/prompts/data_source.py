"""Where prompts come from: groups of samples with an identity, and a position that survives any
number of resumes.

What was handed out but not trained is part of the saved state. Each group is remembered from
`get_samples` on until the rollout that used it up is saved: the rollout function calls
`commit(rollout_id, group_ids)` for every group it kept or dropped and `add_samples` for every group
that it gives back. The state saved after rollout r holds the position, the buffer, and every group
that rollouts after r used or that are still out; on resume those come first, in order, so that the
stream equals the uninterrupted one. A rollout function that never calls `commit` is taken to have
used up all that it was given and did not give back.
"""

from __future__ import annotations

import abc
import argparse
import copy
import dataclasses
import logging
import threading
from collections.abc import Collection, Iterable
from typing import Any, TypeGuard

from slime.config.rules.rollout import SUPERVISED
from slime.data.run_ledger import StreamMark
from slime.data.sample import Sample
from slime.data.structure import Group, iter_samples
from slime.exceptions import ConfigError
from slime.plugins.filter_calls import call_filter, require_groups
from slime.prompts.data_position import (
    decode_group,
    encode_group,
    read_state,
    state_path,
    write_json,
)
from slime.prompts.dataset import Dataset, parts_of
from slime.utils import processing_utils
from slime.utils.misc import load_function

logger = logging.getLogger(__name__)

STATE_FORMAT = 1


class DataSource(abc.ABC):
    """Hands out groups of samples."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]:
        """`num_samples` groups of `n_samples_per_prompt` samples each."""

    @abc.abstractmethod
    def add_samples(self, samples: list[Group]) -> None:
        """Takes groups back."""

    @abc.abstractmethod
    def save(self, rollout_id: int) -> None:
        """Writes the state in which rollout `rollout_id` is the last one trained."""

    @abc.abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Restores that state."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Prompts per epoch."""

    def commit(self, rollout_id: int, group_ids: Iterable[int]) -> None:  # noqa: B027 - optional for plug-ins
        """Notes that rollout `rollout_id` used these groups up (`Sample.group_index`), trained or
        dropped.
        """


@dataclasses.dataclass(frozen=True)
class GroupOrigin:
    """From where a group can be made again: its place in the stream and its identities."""

    group_index: int
    first_index: int
    epoch_id: int
    offset: int


@dataclasses.dataclass(frozen=True)
class UsedGroups:
    """Groups that rollouts used up, trained or dropped, and those that were given back after that,
    to be served once more. is_told: whether the rollout function said so itself (`commit`).
    """

    origins: tuple[GroupOrigin, ...]
    served_again: tuple[int, ...]
    is_told: bool


def clone_for_group(prompt: Sample) -> Sample:
    """A new sample of the prompt: containers are its own, texts and media are shared (they are
    never edited).
    """
    return Sample(
        prompt=prompt.prompt if isinstance(prompt.prompt, str) else copy.deepcopy(prompt.prompt),
        label=prompt.label if isinstance(prompt.label, str) else copy.deepcopy(prompt.label),
        metadata=copy.deepcopy(prompt.metadata) if prompt.metadata else {},
        multimodal_inputs=prompt.multimodal_inputs,
        apply_chat_template_kwargs=copy.deepcopy(prompt.apply_chat_template_kwargs),
        generate_function_path=prompt.generate_function_path,
        custom_rm_path=prompt.custom_rm_path,
    )


def group_id_of(group: Group) -> int | None:
    """The identity of a group: its samples' `group_index`."""
    return next((sample.group_index for sample in iter_samples(group)), None)


class RolloutDataSource(DataSource):
    """Serves the prompts of --prompt-data, epoch after epoch; without a dataset, empty samples with
    an identity.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.epoch_id = 0
        self.sample_offset = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.metadata: dict[str, Any] = {}
        self.dataset = build_dataset(args) if args.rollout_global_dataset else None
        # Groups handed out and not yet given back or saved as trained, and by which rollout they
        # were used up.
        self._origins: dict[int, GroupOrigin] = {}
        self._used_by: dict[int, int] = {}
        self._is_told = False  # whether the rollout function ever called `commit`
        self._newly_used: dict[int, GroupOrigin] = {}  # since `take_used`
        self._served_again: list[int] = []  # given back after a rollout used them up
        # A worker's thread may ask for groups while the rollout's thread commits or saves.
        self._lock = threading.RLock()
        if self.dataset is not None and args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)

    def get_samples(self, num_samples: int) -> list[Group]:
        with self._lock:
            return [self._next_group() for _ in range(num_samples)]

    def _next_group(self) -> Group:
        if self.dataset is not None and self.sample_offset >= len(self.dataset):
            self.epoch_id += 1
            self.sample_offset = 0
        origin = GroupOrigin(
            self.sample_group_index, self.sample_index, self.epoch_id, self.sample_offset
        )
        group = self._make_group(origin)
        self._origins[origin.group_index] = origin
        self.sample_offset += self.dataset is not None
        self.sample_group_index += 1
        self.sample_index += len(group)
        return group

    def _make_group(self, origin: GroupOrigin) -> Group:
        if self.dataset is None:
            prompt = Sample()
        else:
            if self.args.rollout_shuffle:
                self.dataset.shuffle(origin.epoch_id)
            prompt = self.dataset[origin.offset]
        group = [clone_for_group(prompt) for _ in range(self.args.n_samples_per_prompt)]
        for number, sample in enumerate(group):
            sample.group_index = origin.group_index
            sample.index = origin.first_index + number
        return group

    def add_samples(self, samples: list[Group]) -> None:
        raise RuntimeError(
            f"{type(self).__name__} is read-only; use RolloutDataSourceWithBuffer to take samples "
            "back."
        )

    def commit(self, rollout_id: int, group_ids: Iterable[int]) -> None:
        with self._lock:
            self._is_told = True
            self._use(rollout_id, group_ids)

    def _use(self, rollout_id: int, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            if group_id in self._origins:
                self._newly_used[group_id] = self._origins[group_id]
            if self.args.save is None:
                self._origins.pop(group_id, None)
            else:
                self._used_by[group_id] = rollout_id

    def take_used(self, rollout_id: int) -> UsedGroups:
        """What was used up since the call before, by rollout `rollout_id`. Where the rollout
        function never called `commit`: all that it was given and did not give back.
        """
        with self._lock:
            if not self._is_told:
                self._use(rollout_id, self._origins.keys() - self._used_by.keys() - self._waiting())
            used = UsedGroups(
                tuple(origin for _, origin in sorted(self._newly_used.items())),
                tuple(sorted(self._served_again)),
                is_told=self._is_told,
            )
            self._newly_used, self._served_again = {}, []
            return used

    def mark(self) -> StreamMark:
        """How far the stream of prompts has been handed out."""
        with self._lock:
            return StreamMark(
                groups=self.sample_group_index,
                epoch=self.epoch_id,
                offset=self.sample_offset,
                num_prompts=None if self.dataset is None else len(self.dataset),
                group_size=self.args.n_samples_per_prompt,
            )

    def waiting_groups(self, rollout_id: int) -> list[int]:
        """The groups, by identity, that the state after `rollout_id` serves again."""
        with self._lock:
            return [origin.group_index for origin in self._untrained(rollout_id)]

    def _waiting(self) -> set[int | None]:
        """Identities of groups that were given back."""
        return set()

    def _untrained(self, rollout_id: int) -> list[GroupOrigin]:
        """Groups that are out, or that a rollout after `rollout_id` used, in order of their
        identity.
        """
        waiting = self._waiting()
        return [
            origin
            for group_id, origin in sorted(self._origins.items())
            if self._used_by.get(group_id, rollout_id + self._is_told) > rollout_id
            or (not self._is_told and group_id in waiting)
        ]

    def state_dict(self, rollout_id: int) -> dict[str, Any]:
        """The state, as JSON-able values, in which rollout `rollout_id` is the last one trained."""
        with self._lock:
            return self._state_dict(rollout_id)

    def _state_dict(self, rollout_id: int) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT,
            "rollout_id": rollout_id,
            "epoch_id": self.epoch_id,
            "sample_offset": self.sample_offset,
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": self.metadata,
            "stream": self._stream(),
            "untrained": [dataclasses.asdict(origin) for origin in self._untrained(rollout_id)],
        }

    def _stream(self) -> dict[str, Any]:
        """What decides which prompt stands at which position."""
        shuffled = self.dataset is not None and self.args.rollout_shuffle
        return {
            "num_prompts": None if self.dataset is None else len(self.dataset),
            "rows_checksum": None if self.dataset is None else self.dataset.rows_checksum,
            "part_checksums": None if self.dataset is None else self.dataset.part_checksums,
            "shuffle_seed": self.args.rollout_seed if shuffled else None,
            "n_samples_per_prompt": self.args.n_samples_per_prompt,
        }

    def whole_state(self) -> dict[str, Any]:
        """All that another process needs to go on in place of this one, as JSON-able values: the
        groups that are remembered, also those that rollouts have used up and no checkpoint has
        behind it.
        """
        with self._lock:
            return {
                "position": self._state_dict(-1),
                "used_by": [list(pair) for pair in sorted(self._used_by.items())],
                "is_told": self._is_told,
            }

    def restore_whole(self, state: dict[str, Any], rollout_id: int) -> None:
        """Restores `whole_state`, with `rollout_id` the last rollout that is over: what is out, or
        was used up later, is served again. ConfigError as `load_state_dict`.
        """
        with self._lock:
            self.load_state_dict(state["position"])
            self._is_told = state["is_told"]
            self._used_by = {group: user for group, user in state["used_by"] if user <= rollout_id}
            self._take_from_waiting(self._used_by.keys())

    def _take_from_waiting(self, group_ids: Collection[int]) -> None:
        """These groups were used up: they are not served again."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`. ConfigError where the dataset or its order is not the one that was
        saved.
        """
        if state.get("format") != STATE_FORMAT:
            raise ConfigError(
                f"the data position has format {state.get('format')!r}; this version reads "
                f"{STATE_FORMAT}."
            )
        try:
            self._check_stream(state["stream"])
            self._restore(state)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"the data position is not one that this version wrote ({type(error).__name__}: "
                f"{error}). Resume from an earlier rollout."
            ) from error

    def _check_stream(self, saved: dict[str, Any]) -> None:
        now = self._stream()
        if "rows_checksum" not in saved and self.dataset is not None:
            logger.warning(
                "the data position has no checksum of the prompts (an earlier version wrote it): "
                "whether %s is the file that the checkpoint was trained on is not checked",
                self.args.prompt_data,
            )
        different = [
            name
            for name in now
            if name != "part_checksums" and (name in saved or name != "rows_checksum")
            if saved[name] != now[name]
        ]
        if not different:
            return
        problem = (
            f"the prompts of {self.args.prompt_data} are not the ones that the checkpoint was "
            "trained on ("
            + "; ".join(f"{name}: saved {saved[name]}, now {now[name]}" for name in different)
            + self._where_different(saved)
            + ")."
        )
        if self.args.accept_changed_prompts and set(different) <= {"num_prompts", "rows_checksum"}:
            logger.warning(
                "%s --accept-changed-prompts: the run goes on at the same number of a prompt",
                problem,
            )
            return
        raise ConfigError(
            problem + " Use the same --prompt-data (every row, in its order), --rollout-shuffle, "
            "--rollout-seed and --n-samples-per-prompt, start with --start-rollout-id 0, or, where "
            "only rows were edited on purpose, give --accept-changed-prompts."
        )

    def _where_different(self, saved: dict[str, Any]) -> str:
        """Which rows the first difference stands among; "" where that is not known."""
        before = saved.get("part_checksums")
        if self.dataset is None or not before or saved.get("num_prompts") != len(self.dataset):
            return ""
        parts = zip(parts_of(len(self.dataset)), before, self.dataset.part_checksums, strict=False)
        for rows, old, new in parts:
            if old != new:
                span = f"{rows[0] + 1}" if len(rows) == 1 else f"{rows[0] + 1} to {rows[-1] + 1}"
                return f"; the first difference is in prompt {span} of {len(self.dataset)}"
        return ""

    def _restore(self, state: dict[str, Any]) -> None:
        self.epoch_id = state["epoch_id"]
        self.sample_offset = state["sample_offset"]
        self.sample_group_index = state["sample_group_index"]
        self.sample_index = state["sample_index"]
        self.metadata = state["metadata"]
        self._used_by = {}
        self._origins = {}
        origins = [GroupOrigin(**origin) for origin in state["untrained"]]
        if self.dataset is not None and any(one.offset >= len(self.dataset) for one in origins):
            raise ConfigError(
                f"groups of prompt {max(one.offset for one in origins) + 1} are to be served again, "
                f"and {self.args.prompt_data} has {len(self.dataset)}. Resume from an earlier "
                "rollout, or give the file its rows back."
            )
        self._restore_untrained(origins, state)

    def _restore_untrained(self, origins: list[GroupOrigin], state: dict[str, Any]) -> None:
        if origins:
            raise ConfigError(
                f"{len(origins)} groups were handed out but not trained when the checkpoint was "
                "saved, and "
                f"{type(self).__name__} cannot serve them again. Use RolloutDataSourceWithBuffer."
            )

    def save(self, rollout_id: int) -> None:
        if self.args.save is None:
            return
        with self._lock:
            state = self.state_dict(rollout_id)
            keep = {origin.group_index for origin in self._untrained(rollout_id)}
        write_json(state_path(self.args.save, rollout_id), state)
        with self._lock:
            is_done = {
                group_id
                for group_id, used_by in self._used_by.items()
                if used_by <= rollout_id and group_id not in keep
            }
            for group_id in is_done:
                self._used_by.pop(group_id)
                self._origins.pop(group_id, None)

    def load(self, rollout_id: int | None = None) -> None:
        if self.args.load is None or rollout_id is None or rollout_id < 0:
            return
        path = state_path(self.args.load, rollout_id)
        if not path.exists():
            raise ConfigError(
                f"cannot resume after rollout {rollout_id}: there is no data position "
                f"{str(path)!r}. "
                "Start at the beginning with --start-rollout-id 0, or give a --load folder that has it."
            )
        self.load_state_dict(read_state(path))
        logger.info(
            "data position after rollout %d: epoch %d, prompt %d",
            rollout_id,
            self.epoch_id,
            self.sample_offset,
        )

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The same, with a buffer of groups that were given back; they are served first."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.buffer: list[Group] = []
        self.buffer_filter = (
            load_function(args.buffer_filter_path) if args.buffer_filter_path else pop_first
        )

    def get_samples(self, num_samples: int) -> list[Group]:
        with self._lock:
            groups = self._from_buffer(num_samples)
            return groups + super().get_samples(num_samples - len(groups))

    def _from_buffer(self, num_samples: int) -> list[Group]:
        if not self.buffer or num_samples == 0:
            return []
        option, path = "--buffer-filter-path", self.args.buffer_filter_path or "pop_first"
        about = f"a buffer of {len(self.buffer)} groups, of which {num_samples} are wanted"
        taken = call_filter(
            option,
            path,
            self.buffer_filter,
            lambda: about,
            self.args,
            None,
            self.buffer,
            num_samples,
        )
        size = self.args.n_samples_per_prompt
        return require_groups(
            option, path, taken, buffer=self.buffer, num_groups=num_samples, group_size=size
        )

    def add_samples(self, samples: list[Group]) -> None:
        """Puts groups into the buffer, which stays in order of identity: the stream does not depend
        on when a group came back. AssertionError for anything but full groups.
        """
        assert isinstance(samples, list), f"expected a list of groups, got {type(samples).__name__}"
        size = self.args.n_samples_per_prompt
        for group in samples:
            assert isinstance(group, list), (
                f"expected a group (a list of samples), got {type(group).__name__}"
            )
            assert len(group) == size, (
                f"a group has {len(group)} members, --n-samples-per-prompt is {size}"
            )
        with self._lock:
            self.buffer += samples
            self.buffer.sort(key=_stream_position)
            for group_id in filter(_is_number, map(group_id_of, samples)):
                is_used = self._used_by.pop(group_id, None) is not None
                if is_used or (self._is_told and group_id not in self._origins):
                    self._served_again.append(group_id)

    def _waiting(self) -> set[int | None]:
        return {group_id_of(group) for group in self.buffer}

    def _take_from_waiting(self, group_ids: Collection[int]) -> None:
        self.buffer = [group for group in self.buffer if group_id_of(group) not in group_ids]

    def _state_dict(self, rollout_id: int) -> dict[str, Any]:
        progress = {}
        for position, group in enumerate(self.buffer):
            group_id = group_id_of(group)
            if group_id not in self._origins or any(
                not is_pristine(sample) for sample in iter_samples(group)
            ):
                progress[str(group_id if group_id is not None else f"unnamed-{position}")] = (
                    encode_group(group)
                )
        return {**super()._state_dict(rollout_id), "buffer_groups": progress}

    def _restore_untrained(self, origins: list[GroupOrigin], state: dict[str, Any]) -> None:
        encoded = dict(state["buffer_groups"])
        self._origins = {origin.group_index: origin for origin in origins}
        self.buffer = []
        for origin in origins:
            progress = encoded.pop(str(origin.group_index), None)
            self.buffer.append(
                self._make_group(origin) if progress is None else decode_group(progress)
            )
        self.buffer += [decode_group(group) for group in encoded.values()]


def _is_number(group_id: object) -> TypeGuard[int]:
    return type(group_id) is int


def _stream_position(group: Group) -> tuple[bool, int]:
    """Sort key: the group's identity; groups without one stand last, in their order."""
    group_id = group_id_of(group)
    return (group_id is None, group_id or 0)


def pop_first(
    args: argparse.Namespace, rollout_id: int | None, buffer: list[Group], num_samples: int
) -> list[Group]:
    """Removes and returns the oldest `num_samples` groups of the buffer (all of them where it has
    fewer).
    """
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def build_dataset(args: argparse.Namespace) -> Dataset:
    """The dataset of --prompt-data, with the tokenizer of --hf-checkpoint where rendering or the
    filter needs it.
    """
    if not args.prompt_data:
        raise ConfigError(
            "--prompt-data is missing. Give a .jsonl, .parquet, .json or .csv file, or "
            "--disable-rollout-global-dataset with a "
            "rollout function that makes its own prompts."
        )
    max_length = args.rollout_max_prompt_len
    needs_tokenizer = args.apply_chat_template or max_length is not None or args.multimodal_keys
    return Dataset(
        args.prompt_data,
        processing_utils.shared_tokenizer(args.hf_checkpoint) if needs_tokenizer else None,
        processing_utils.load_processor(args.hf_checkpoint) if args.multimodal_keys else None,
        max_length,
        prompt_key=args.input_key,
        multimodal_keys=args.multimodal_keys,
        label_key=args.label_key,
        tool_key=args.tool_key,
        metadata_key=args.metadata_key,
        seed=args.rollout_seed,
        apply_chat_template=args.apply_chat_template,
        apply_chat_template_kwargs=args.apply_chat_template_kwargs,
        supervised=args.loss_mask_type if args.rollout_function_path == SUPERVISED else None,
    )


def is_pristine(sample: Sample) -> bool:
    """Whether nothing was generated for the sample yet."""
    return (
        sample.response_length == 0
        and not sample.response
        and sample.status is Sample.Status.PENDING
    )
