"""`Sample`: one prompt with one response, from the data source to the trainer. Imports nothing
heavy.

Shapes: T = response_length (tokens after the prompt); `tokens` holds prompt + response ids, so
len(tokens) >= T.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
from typing import Any, ClassVar, cast

from slime.data.number_list import joined, number_list
from slime.exceptions import RolloutDataError
from slime.typing import Numbers
from slime.utils.misc import decode_int32_meta_array

RolloutBatch = dict[str, list]


@dataclasses.dataclass
class SpecInfo:
    """Speculative-decoding counters, summed over the generation calls of one sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted share of drafted tokens, 0.0 without drafts."""
        return (
            self.spec_accept_token_num / self.spec_draft_token_num
            if self.spec_draft_token_num
            else 0.0
        )

    @property
    def spec_accept_length(self) -> float:
        """Tokens produced per verification pass, 0.0 without passes."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: dict) -> None:
        """Adds one engine reply's counters."""
        self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
        self.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)

    def to_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: dict) -> SpecInfo:
        return SpecInfo(**{f.name: data.get(f.name, 0) for f in dataclasses.fields(SpecInfo)})


@dataclasses.dataclass
class PrefixCacheInfo:
    """Prefix-cache counters, summed over the generation calls of one sample."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached share of prompt tokens, 0.0 without prompt tokens."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: dict) -> None:
        """Adds one engine reply's counters."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

    def to_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: dict) -> PrefixCacheInfo:
        return PrefixCacheInfo(
            **{f.name: data.get(f.name, 0) for f in dataclasses.fields(PrefixCacheInfo)}
        )


class Status(enum.Enum):
    """Where a sample stands: not generated, ended by itself, cut at a limit, aborted by us, failed
    by an error.
    """

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


STATUS_OF_FINISH_REASON = {
    "length": Status.TRUNCATED,
    "abort": Status.ABORTED,
    "stop": Status.COMPLETED,
}

# Sample has attributes of these names, which hide the classes in its annotations
_Status = Status
_SpecInfo = SpecInfo
_PrefixCacheInfo = PrefixCacheInfo


@dataclasses.dataclass
class Sample:
    """One prompt with one response, its reward, its identity and what the engine said about it."""

    Status: ClassVar[type[_Status]] = _Status
    SpecInfo: ClassVar[type[_SpecInfo]] = _SpecInfo
    PrefixCacheInfo: ClassVar[type[_PrefixCacheInfo]] = _PrefixCacheInfo

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict] = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    multimodal_inputs: dict | None = None
    multimodal_train_inputs: dict | None = None
    multimodal_train_input_id: Any = None
    apply_chat_template_kwargs: dict = dataclasses.field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = dataclasses.field(default_factory=list)
    # [version or None, tokens], in order of the response
    weight_version_spans: list[list] = dataclasses.field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: _Status = _Status.PENDING
    finish_reason: str | None = None
    valid: bool = True
    invalid_reason: str | None = None
    metadata: dict = dataclasses.field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: _SpecInfo = dataclasses.field(default_factory=_SpecInfo)
    prefix_cache_info: _PrefixCacheInfo = dataclasses.field(default_factory=_PrefixCacheInfo)

    def to_dict(self) -> dict[str, Any]:
        """Every instance attribute, `status` as its string, counters as dicts. Lists are aliased,
        not copied.
        """
        return {
            **self.__dict__,
            "status": self.status.value,
            "spec_info": self.spec_info.to_dict(),
            "prefix_cache_info": self.prefix_cache_info.to_dict(),
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        """The sample of `to_dict`. Unknown keys become attributes; `data` is not modified. KeyError
        without `status`.
        """
        data = dict(data)
        known: dict[str, Any] = {
            "status": Status(data.pop("status")),
            "spec_info": SpecInfo.from_dict(data.pop("spec_info", None) or {}),
            "prefix_cache_info": PrefixCacheInfo.from_dict(
                data.pop("prefix_cache_info", None) or {}
            ),
        }
        extra = {key: data.pop(key) for key in list(data) if key not in _FIELD_NAMES}
        sample = Sample(**data, **known)
        sample.__dict__.update(extra)
        return sample

    def get_reward_value(self, args: argparse.Namespace) -> Any:
        """`reward`, or `reward[args.reward_key]` where a key is set. RolloutDataError naming the
        keys where it is not one.
        """
        return (
            chosen_reward(self.reward, args.reward_key, index=self.index)
            if args.reward_key
            else self.reward
        )

    @property
    def effective_response_length(self) -> int:
        """Trainable response tokens: the mask's sum, or the response length without a mask."""
        if self.loss_mask is None:
            return self.response_length
        return sum(
            self.loss_mask if isinstance(self.loss_mask, list) else number_list(self.loss_mask)
        )

    def append_response_tokens(
        self,
        args: argparse.Namespace | None = None,
        *,
        tokens: Numbers | None = None,
        log_probs: Numbers | None = None,
        trainable: bool = True,
        meta_info: dict | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Appends what one generation call (trainable) or an environment (not trainable) added to
        the response.

        `tokens` are new token ids [K], `log_probs` their log-probabilities [K] in nats, `meta_info`
        the engine's reply. Raises ValueError where lengths disagree, where trainable tokens lack
        log-probs, or non-trainable ones have them. Nothing is changed when it raises on its
        arguments.
        """
        tokens, log_probs = (
            number_list(tokens),
            None if log_probs is None else number_list(log_probs),
        )
        _check_append(self, tokens, log_probs, trainable)
        nucleus = _new_nucleus(meta_info or {}, len(tokens)) if tokens and trainable else None
        if text:
            self.response += text
        if tokens:
            self._extend(tokens, log_probs, trainable)
            self.weight_version_spans = [
                *self.weight_version_spans,
                *_new_spans(meta_info or {}, len(tokens), trainable),
            ]
            _append_nucleus(self, nucleus, len(tokens))
        if meta_info is not None:
            _set_routed_experts(self, meta_info, args)
            if update_terminal_info and meta_info.get("finish_reason"):
                self._set_terminal_info(args, meta_info)
        self._check_lengths()

    def _extend(self, tokens: list[int], log_probs: list[float] | None, trainable: bool) -> None:
        had = self.response_length
        if self.loss_mask is None:
            self.loss_mask = [1] * had
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * had
        self.tokens = joined(self.tokens, tokens)
        self.loss_mask = joined(self.loss_mask, [int(trainable)] * len(tokens))
        self.rollout_log_probs = joined(
            self.rollout_log_probs,
            cast("list[float]", log_probs) if trainable else [0.0] * len(tokens),
        )
        self.response_length = had + len(tokens)

    def _set_terminal_info(self, args: argparse.Namespace | None, meta_info: dict) -> None:
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        self.finish_reason = meta_info["finish_reason"]["type"]
        self.status = STATUS_OF_FINISH_REASON.get(self.finish_reason, self.status)

    def _check_lengths(self) -> None:
        for name in ("loss_mask", "rollout_log_probs"):
            values = getattr(self, name)
            if values is not None and len(values) != self.response_length:
                raise ValueError(
                    f"sample {self.index}: {name} has {len(values)} entries, response_length is "
                    f"{self.response_length}"
                )
        offsets = self.rollout_top_p_token_offsets
        if offsets is not None and (
            len(offsets) != self.response_length + 1
            or int(offsets[-1]) != len(self.rollout_top_p_token_ids)
        ):
            raise ValueError(
                f"sample {self.index}: {len(offsets)} nucleus offsets ending at {int(offsets[-1])} "
                "do not fit "
                f"{self.response_length} response tokens and {len(self.rollout_top_p_token_ids)} ids"
            )


_FIELD_NAMES = frozenset(f.name for f in dataclasses.fields(Sample))


def _check_append(sample: Sample, tokens: list, log_probs: list | None, trainable: bool) -> None:
    if log_probs is not None and len(log_probs) != len(tokens):
        raise ValueError(f"{len(log_probs)} log-probs for {len(tokens)} tokens")
    if tokens and trainable and log_probs is None:
        raise ValueError("trainable response tokens require rollout log probabilities")
    if tokens and not trainable and log_probs is not None:
        raise ValueError("non-trainable response tokens should not pass rollout log probabilities")
    if tokens and trainable and sample.rollout_log_probs is None and sample.response_length:
        raise ValueError(
            f"sample {sample.index}: {sample.response_length} earlier response tokens have no "
            "rollout log-probs, so trainable tokens cannot follow"
        )


def _new_spans(meta_info: dict, num_tokens: int, trainable: bool) -> list[list]:
    """[version, tokens] of the new tokens: the reply's spans, else its one version; None for
    tokens that were not sampled.
    """
    spans = meta_info.get("weight_versions")
    if trainable and isinstance(spans, list) and sum(count for _, count in spans) == num_tokens:
        return [[str(version), count] for version, count in spans]
    version = meta_info.get("weight_version") if trainable else None
    return [[None if version is None else str(version), num_tokens]]


def _new_nucleus(meta_info: dict, num_tokens: int) -> tuple[list[int], list[int]] | None:
    """The checked (ids, offsets) of the new tokens' nucleus, or None where the engine sent none."""
    ids = decode_int32_meta_array(meta_info, ["top_p_token_ids", "top_p_kept_token_ids"])
    offsets = decode_int32_meta_array(
        meta_info, ["top_p_token_offsets", "top_p_kept_token_offsets"]
    )
    if ids is None and offsets is None:
        return None
    if ids is None or offsets is None:
        raise ValueError(
            "top_p_token_ids and top_p_token_offsets must come together; only one is present"
        )
    ids, offsets = ids.tolist(), offsets.tolist()
    if not offsets or offsets[0] != 0:
        raise ValueError(f"top_p_token_offsets must start with 0, got {offsets[:3]}")
    if offsets[-1] != len(ids):
        raise ValueError(
            f"last top_p_token_offset is {offsets[-1]}, but there are {len(ids)} top_p_token_ids"
        )
    if len(offsets) != num_tokens + 1:
        raise ValueError(
            f"{len(offsets)} top_p_token_offsets for {num_tokens} new tokens; expected "
            f"{num_tokens + 1}"
        )
    return ids, offsets


def _append_nucleus(
    sample: Sample, nucleus: tuple[list[int], list[int]] | None, num_tokens: int
) -> None:
    """Extends the sample's nucleus fields by the new tokens' (empty spans where there is none but
    the sample has some).
    """
    if nucleus is None and sample.rollout_top_p_token_offsets is None:
        return
    import torch

    old_ids = number_list(sample.rollout_top_p_token_ids)
    old_offsets = number_list(sample.rollout_top_p_token_offsets) or [0] * (
        sample.response_length - num_tokens + 1
    )
    ids, offsets = nucleus if nucleus is not None else ([], [0] * (num_tokens + 1))
    shifted = [old_offsets[-1] + offset for offset in offsets[1:]]
    sample.rollout_top_p_token_ids = torch.tensor(old_ids + ids, dtype=torch.int32)
    sample.rollout_top_p_token_offsets = torch.tensor(old_offsets + shifted, dtype=torch.int32)


def _set_routed_experts(sample: Sample, meta_info: dict, args: argparse.Namespace | None) -> None:
    """Stores the expert ids [len(tokens) - 1, num_layers, topk] that the engine returned, from row
    `routed_experts_start_len` on.
    """
    if meta_info.get("routed_experts") is None:
        return
    import torch

    if args is None:
        raise ValueError("routed_experts need args with num_layers and moe_router_topk")
    flat = decode_int32_meta_array(meta_info, ["routed_experts"])
    start = int(meta_info.get("routed_experts_start_len") or 0)
    rows = max(0, len(sample.tokens) - 1 - start)
    expected = rows * args.num_layers * args.moe_router_topk
    if start < 0 or flat.numel() != expected:
        raise ValueError(
            f"routed_experts element count {flat.numel()}, expected {expected} ({rows} rows from "
            f"row {start})"
        )
    new = flat.reshape(rows, args.num_layers, args.moe_router_topk)
    old = sample.rollout_routed_experts
    if start and (old is None or len(old) < start):
        raise ValueError(
            f"routed_experts start at row {start}, but only {0 if old is None else len(old)} rows "
            "are stored"
        )
    sample.rollout_routed_experts = torch.cat([torch.as_tensor(old)[:start], new]) if start else new


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """One parameter as it is announced between ranks before its weights move."""

    name: str
    dtype: Any
    shape: Any
    attrs: dict
    size: int
    src_rank: int


@dataclasses.dataclass(frozen=True)
class MultimodalType:
    """A kind of media and the text that stands for it in a prompt."""

    name: str
    placeholder: str


class MultimodalTypes:
    """The kinds of media that a prompt may hold."""

    IMAGE = MultimodalType("image", "<image>")
    VIDEO = MultimodalType("video", "<video>")
    AUDIO = MultimodalType("audio", "<audio>")

    @classmethod
    def all(cls) -> list[MultimodalType]:
        return [cls.IMAGE, cls.VIDEO, cls.AUDIO]

    @classmethod
    def get(cls, name: str) -> MultimodalType | None:
        """The kind of that name, None if unknown."""
        return next((kind for kind in cls.all() if kind.name == name), None)


def scalar(value: object) -> Any:
    """The number in an array or tensor without dimensions; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def chosen_reward(reward: object, reward_key: str | None, *, index: object = None) -> Any:
    """The reward itself, or what a dict of rewards holds under `reward_key`. RolloutDataError names
    the keys where it lacks that key.
    """
    if not isinstance(reward, dict):
        return reward
    if not reward_key or reward_key not in reward:
        raise RolloutDataError(
            f"The reward of sample {index} is a dict with keys {sorted(map(str, reward))}; "
            + (f"it has no key {reward_key!r}. " if reward_key else "")
            + "Choose one of them with --reward-key (in evaluation: --eval-reward-key)."
        )
    return reward[reward_key]
