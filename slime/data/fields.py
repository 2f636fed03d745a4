"""The field contract: one declaration per field that travels from samples to metrics.

Everything that needs to know something about a field asks here: what is shipped to the training
ranks and how it is split, its dtype on the wire and on the device, whether it is sharded over
context-parallel ranks, which length each entry must have, whether it is a metric and how that
metric is reduced. There is no other list of keys. A plug-in adds its own with `declare_field`.

*scope* says what one entry describes; *extent* says which samples the list covers. They are two
columns, because confusing them pairs one sample's reward with another sample's tokens.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import TYPE_CHECKING, Any, TypeVar

from slime.exceptions import RolloutDataError

if TYPE_CHECKING:
    import numpy as np

Lengths = TypeVar("Lengths", int, "np.ndarray")  # of one sample, or of all [N]

# What another parallel layout may change, on the scale of one: |a - b| <= x + x max(|a|, |b|). The
# layout matrix holds every layout to these.
LAYOUT_TOLERANCE, GRADIENT_LAYOUT_TOLERANCE = 1e-5, 1e-4


class Scope(enum.Enum):
    """What one entry of the list describes."""

    TOKEN = "token"  # an array with one row per token of the sample
    SAMPLE = "sample"  # one value per sample
    STEP = "step"  # one value per optimizer step
    LAYOUT = "layout"  # how this rank walks over its samples


class Extent(enum.Enum):
    """Which samples the list covers on a training rank."""

    LOCAL = "local"  # the samples of this data-parallel rank, in consumption order
    WHOLE = "whole"  # every sample of the rollout batch, the same list on every rank
    EQUAL = "equal"  # not per sample; the same on every rank


class Rows(enum.Enum):
    """How many rows the entry of a TOKEN field has, in terms of its sample."""

    TOTAL = "prompt + response tokens"
    RESPONSE = "response tokens"
    RESPONSE_PLUS_ONE = "response tokens + 1"
    TOTAL_MINUS_ONE = "prompt + response tokens - 1"
    FREE = "any number"


class Origin(enum.Enum):
    """Who makes the field, and therefore whether it is on the wire."""

    ROLLOUT = "rollout"  # from samples or a custom converter; shipped
    SPLIT = "split"  # computed when the batch is split over ranks; shipped
    ARRIVAL = "arrival"  # derived on the training rank when the shard arrives; never shipped
    TRAINING = "training"  # computed by the training ranks; never shipped


class Missing(enum.Enum):
    """What happens when only some of the valid samples have the field."""

    ERROR = "error"
    FILL = "fill"  # the declared `fill` value stands in
    NONE = "none"  # None is a legitimate entry


class Reduce(enum.Enum):
    """How a field, or a metric, becomes one number over all samples and ranks."""

    NONE = "none"  # never a metric
    ROLLOUT_MEAN = (
        # masked token mean within a rollout, then the mean over rollouts with a trainable token
        "rollout mean"
    )
    # mean over the samples of a rollout, then over rollouts: one vote per rollout
    SAMPLE_MEAN = "sample mean"
    TOKEN_MEAN = "token mean"
    MEAN = "mean"  # sum of values over sum of counts
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    QUANTILES = "quantiles"  # over the union of all ranks' values


@dataclasses.dataclass(frozen=True)
class FieldSpec:
    """One row of the contract. dtypes are numpy names; `wire_dtype` None means Python objects,
    carried as they are.
    """

    name: str
    scope: Scope
    extent: Extent = Extent.LOCAL
    rows: Rows | None = None
    wire_dtype: str | None = None
    device_dtype: str | None = None  # dtype for the model; None keeps the wire dtype
    to_device: bool = False
    cp_sharded: bool = False
    # TOKEN: one number per row; metrics are always so, other fields may have more dimensions
    flat: bool = False
    ships_whole: bool = False  # whole on the wire, this rank's part after `localize`
    # name under which a WHOLE field's local part appears after `localize`
    local_view: str | None = None
    origin: Origin = Origin.ROLLOUT
    # "attribute" or "attribute.key" of Sample; None: built by its own rule, or by a plug-in
    source: str | None = None
    missing: Missing = Missing.ERROR
    fill: Any = None
    reduce: Reduce = Reduce.NONE
    metric: str | None = None  # name under rollout/; None means the field's own name
    # how far two layouts may be apart, see LAYOUT_TOLERANCE; None: by `layout_tolerance`'s rule
    tolerance: float | None = None
    help: str = ""

    @property
    def layout_tolerance(self) -> float:
        """How far entries may be apart in two runs whose parallel layouts differ: what training
        computes is rounded in another order, all else is the same to the last bit.
        """
        if self.tolerance is not None:
            return self.tolerance
        return LAYOUT_TOLERANCE if self.origin is Origin.TRAINING else 0.0

    @property
    def shipped(self) -> bool:
        return self.origin in (Origin.ROLLOUT, Origin.SPLIT)

    @property
    def per_sample(self) -> bool:
        """True when the list has one entry per sample (of its extent)."""
        return self.scope in (Scope.TOKEN, Scope.SAMPLE)

    @property
    def ragged(self) -> bool:
        """True when entries are arrays that travel as one values array and one offsets array."""
        return self.scope is Scope.TOKEN and (
            self.wire_dtype is not None or self.origin is Origin.TRAINING
        )

    @property
    def one_number_per_row(self) -> bool:
        """True when an entry of this TOKEN field has one dimension."""
        return self.scope is Scope.TOKEN and (self.flat or self.reduce is not Reduce.NONE)

    @property
    def metric_name(self) -> str:
        return self.metric or self.name

    def expected_rows(self, total_length: Lengths, response_length: Lengths) -> Lengths | None:
        """Rows an entry must have for a sample of these lengths, or None where any number is right.
        Works on arrays too.
        """
        if self.rows is Rows.TOTAL:
            return total_length
        if self.rows is Rows.RESPONSE:
            return response_length
        if self.rows is Rows.RESPONSE_PLUS_ONE:
            return response_length + 1
        if self.rows is Rows.TOTAL_MINUS_ONE:
            return total_length - 1
        return None


class Contract:
    """The declared fields by name. `CONTRACT[name]` raises `RolloutDataError` saying what to
    declare for an unknown one.
    """

    def __init__(self, specs: tuple[FieldSpec, ...]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._builtin = frozenset(self._specs)

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __iter__(self):
        return iter(self._specs.values())

    def __len__(self) -> int:
        return len(self._specs)

    def __getitem__(self, name: str) -> FieldSpec:
        try:
            return self._specs[name]
        except KeyError:
            raise RolloutDataError(
                f"The field {name!r} is not declared in the data contract. Declare it once, before "
                "the first rollout, with "
                f"slime.data.fields.declare_field({name!r}, scope=..., ...)."
            ) from None

    def find(self, name: str) -> FieldSpec | None:
        """The declaration of `name`, or None."""
        return self._specs.get(name)

    def add(self, spec: FieldSpec) -> None:
        known = self._specs.get(spec.name)
        if known is not None and known != spec:
            kind = (
                "part of slime's own contract"
                if spec.name in self._builtin
                else "already declared differently"
            )
            raise RolloutDataError(
                f"The field {spec.name!r} is {kind}: {known}. Choose another name for {spec}."
            )
        self._specs[spec.name] = spec

    @property
    def of_plug_ins(self) -> tuple[FieldSpec, ...]:
        """The declarations that are not slime's own."""
        return tuple(spec for spec in self if spec.name not in self._builtin)

    def remove(self, name: str) -> None:
        """Forgets a plug-in's field (for tests and for reloading plug-ins). slime's own fields
        stay.
        """
        if name in self._builtin:
            raise RolloutDataError(
                f"{name!r} is part of slime's own contract and cannot be removed."
            )
        self._specs.pop(name, None)


def _token(name: str, rows: Rows, wire_dtype: str, **kw: Any) -> FieldSpec:
    return FieldSpec(name, Scope.TOKEN, rows=rows, wire_dtype=wire_dtype, **kw)


def _sample(name: str, wire_dtype: str | None, **kw: Any) -> FieldSpec:
    return FieldSpec(name, Scope.SAMPLE, wire_dtype=wire_dtype, **kw)


def _computed(name: str, help: str) -> FieldSpec:
    return FieldSpec(
        name,
        Scope.TOKEN,
        rows=Rows.RESPONSE,
        to_device=True,
        cp_sharded=True,
        origin=Origin.TRAINING,
        reduce=Reduce.ROLLOUT_MEAN,
        help=help,
    )


_LOG_PROBS = {"to_device": True, "cp_sharded": True, "reduce": Reduce.ROLLOUT_MEAN}
_NUCLEUS = {"to_device": True, "flat": True}

CONTRACT = Contract(
    (
        # what the model reads
        _token(
            "tokens",
            Rows.TOTAL,
            "int32",
            device_dtype="int64",
            to_device=True,
            flat=True,
            help="Prompt and response token ids.",
        ),
        _token(
            "loss_masks",
            Rows.RESPONSE,
            "uint8",
            device_dtype="int32",
            to_device=True,
            flat=True,
            help="1 where a response token is trained.",
        ),
        _token(
            "rollout_top_p_token_ids",
            Rows.FREE,
            "int32",
            source="rollout_top_p_token_ids",
            help="Ids kept by nucleus sampling.",
            **_NUCLEUS,
        ),
        _token(
            "rollout_top_p_token_offsets",
            Rows.RESPONSE_PLUS_ONE,
            "int32",
            source="rollout_top_p_token_offsets",
            help="Where each response token's kept ids start.",
            **_NUCLEUS,
        ),
        _token(
            "rollout_routed_experts",
            Rows.TOTAL_MINUS_ONE,
            "smallest",
            source="rollout_routed_experts",
            help="Expert ids by token, layer and rank in the router's top-k.",
        ),
        _sample(
            "multimodal_train_inputs",
            None,
            source="multimodal_train_inputs",
            missing=Missing.NONE,
            to_device=True,
        ),
        # lengths
        _sample("response_lengths", "int32", reduce=Reduce.SAMPLE_MEAN),
        _sample("total_lengths", "int32", reduce=Reduce.SAMPLE_MEAN, ships_whole=True),
        # rewards
        _sample(
            "rewards",
            "float32",
            missing=Missing.FILL,
            fill=math.nan,
            reduce=Reduce.SAMPLE_MEAN,
            help=(
                "Normalized by group; what the estimator reads. A sample without one does not "
                "train."
            ),
        ),
        _sample(
            "raw_reward",
            "float64",
            extent=Extent.WHOLE,
            local_view="local_raw_reward",
            missing=Missing.FILL,
            fill=math.nan,
            reduce=Reduce.SAMPLE_MEAN,
            help="As scored; NaN where there is no score. Whole, because pass@k needs all "
            "siblings. As a metric, over the rollout batch: what the gate "
            "rejected for what the model wrote is 0, and groups that a filter dropped are not in it. rollout/reward/mean is over those as well.",
        ),
        _sample(
            "local_raw_reward",
            "float64",
            origin=Origin.ARRIVAL,
            help="raw_reward of this rank's samples.",
        ),
        _sample(
            "truncated",
            "int8",
            help=(
                "Cut at a length limit. As a metric, the share of what was sampled, logged on the "
                "rollout side."
            ),
        ),
        _sample(
            "round_number",
            "int32",
            source="metadata.round_number",
            missing=Missing.FILL,
            fill=0,
            reduce=Reduce.SAMPLE_MEAN,
        ),
        # verdicts
        _sample(
            "valid", "bool", extent=Extent.WHOLE, source="valid", missing=Missing.FILL, fill=True
        ),
        _sample(
            "model_failure",
            "bool",
            extent=Extent.WHOLE,
            help=(
                "Rejected for what the model wrote (empty, cut, malformed): wrong in pass@k. "
                "Infrastructure failures are left out of it."
            ),
        ),
        _sample("invalid_reason", None, source="invalid_reason", missing=Missing.NONE),
        # identities
        _sample("sample_indices", "int64", source="index", missing=Missing.NONE),
        _sample("rollout_ids", "int64"),
        _sample("group_ids", "int64", extent=Extent.WHOLE, local_view="local_group_ids"),
        _sample("local_group_ids", "int64", origin=Origin.ARRIVAL),
        _sample("source_names", None),
        _sample("metadata", None, source="train_metadata", missing=Missing.NONE),
        _sample(
            "oldest_weight_version",
            "int64",
            missing=Missing.FILL,
            fill=-1,
            help=(
                "Number of the oldest weights that sampled one of its tokens, -1 where none is "
                "known: staleness, counted when it is trained."
            ),
        ),
        # made by the split
        _sample(
            "rollout_mask_sums",
            "float32",
            origin=Origin.SPLIT,
            to_device=True,
            help="Trainable tokens of the sample's whole rollout.",
        ),
        _sample(
            "rollout_sample_counts",
            "int32",
            origin=Origin.SPLIT,
            help="Trained samples of the sample's whole rollout.",
        ),
        _sample(
            "owner_ranks",
            "int16",
            extent=Extent.WHOLE,
            origin=Origin.SPLIT,
            help="Data-parallel rank that trains it, -1 for none.",
        ),
        _sample(
            "all_rollout_ids",
            "int64",
            extent=Extent.WHOLE,
            origin=Origin.SPLIT,
            help="rollout_ids of the whole batch.",
        ),
        _sample(
            "raw_reward_weights",
            "float64",
            extent=Extent.WHOLE,
            origin=Origin.SPLIT,
            help=(
                "The sample's share of its rollout's one vote; 0 for what was lost. What the "
                "model failed at counts, with reward 0."
            ),
        ),
        _sample(
            "partition",
            "int64",
            origin=Origin.SPLIT,
            help="Position of the sample in the whole batch.",
        ),
        FieldSpec(
            "global_batch_sizes",
            Scope.STEP,
            Extent.EQUAL,
            origin=Origin.SPLIT,
            help="Rollouts that train, per step.",
        ),
        FieldSpec(
            "num_microbatches",
            Scope.STEP,
            Extent.EQUAL,
            origin=Origin.SPLIT,
            help="Micro-batches per rank, per step.",
        ),
        FieldSpec(
            "micro_batch_indices",
            Scope.LAYOUT,
            origin=Origin.SPLIT,
            help="Local positions per micro-batch, over all steps.",
        ),
        # log-probabilities from elsewhere
        _token(
            "rollout_log_probs",
            Rows.RESPONSE,
            "float32",
            source="rollout_log_probs",
            tolerance=LAYOUT_TOLERANCE,  # of weights that another layout trained
            help="By the engine.",
            **_LOG_PROBS,
        ),
        _token(
            "teacher_log_probs",
            Rows.RESPONSE,
            "float32",
            source="teacher_log_probs",
            tolerance=LAYOUT_TOLERANCE,
            help="By a teacher.",
            **_LOG_PROBS,
        ),
        # made by the training ranks
        _computed("log_probs", "By the policy that is trained, before the step."),
        _computed("ref_log_probs", "By the reference policy."),
        _computed("values", "By the critic."),
        _computed("advantages", "Per token."),
        _computed("returns", "Target of the critic."),
        _computed("kl", "Raw KL to the reference."),
        _computed("entropy", "Of the policy's next-token distribution."),
        _computed("ref_entropy", "Of the reference."),
        _computed("teacher_entropy", "Of the teacher."),
        _computed("opd_reverse_kl", "Student to teacher, per sampled token."),
    )
)


def declare_field(name: str, *, scope: Scope = Scope.SAMPLE, **kw: Any) -> FieldSpec:
    """Adds a plug-in's field to the contract and returns its `FieldSpec`. Call it at import time of
    the plug-in: what the rollout side knows travels with the data and is declared on the training
    ranks as it arrives.

    `source` names the `Sample` attribute it is read from ("train_metadata.difficulty" reads a key);
    without it a custom converter provides the list. A TOKEN field needs `rows` and `wire_dtype`,
    unless `origin=Origin.TRAINING`. Declaring the same thing twice is fine; a different declaration
    under a known name raises `RolloutDataError`.
    """
    spec = FieldSpec(name, scope, **kw)
    _check_kinds(spec)
    if spec.scope is Scope.TOKEN and spec.rows is None:
        raise RolloutDataError(
            f"declare_field({name!r}, scope=Scope.TOKEN) needs rows=Rows.RESPONSE or another "
            "member of Rows."
        )
    if spec.scope is Scope.TOKEN and spec.wire_dtype is None and spec.shipped:
        raise RolloutDataError(
            f"declare_field({name!r}, scope=Scope.TOKEN) needs wire_dtype, for example 'float32'."
        )
    if spec.cp_sharded and (spec.scope is not Scope.TOKEN or spec.rows is not Rows.RESPONSE):
        raise RolloutDataError(
            f"declare_field({name!r}, cp_sharded=True) needs scope=Scope.TOKEN and "
            "rows=Rows.RESPONSE."
        )
    if spec.cp_sharded and not spec.to_device and spec.shipped:
        raise RolloutDataError(
            f"declare_field({name!r}, cp_sharded=True) needs to_device=True: it is cut on its way "
            "to the device."
        )
    _check_reduce(spec)
    CONTRACT.add(spec)
    return spec


def _check_kinds(spec: FieldSpec) -> None:
    kinds = {
        "scope": Scope,
        "extent": Extent,
        "origin": Origin,
        "missing": Missing,
        "reduce": Reduce,
    }
    for attribute, kind in kinds.items():
        value = getattr(spec, attribute)
        if not isinstance(value, kind):
            raise RolloutDataError(
                f"declare_field({spec.name!r}, {attribute}={value!r}) needs one of "
                f"{', '.join(map(str, kind))}."
            )
    for attribute in ("wire_dtype", "device_dtype"):
        dtype = getattr(spec, attribute)
        if dtype is not None and dtype != "smallest" and not _is_dtype(dtype):
            raise RolloutDataError(
                f"declare_field({spec.name!r}, {attribute}={dtype!r}) needs a numpy dtype's name, "
                "for example 'float32'."
            )


def _is_dtype(name: str) -> bool:
    import numpy as np

    try:
        np.dtype(name)
    except TypeError:
        return False
    return True


SAMPLE_REDUCTIONS = (
    Reduce.SAMPLE_MEAN,
    Reduce.MEAN,
    Reduce.SUM,
    Reduce.MIN,
    Reduce.MAX,
    Reduce.QUANTILES,
)
TOKEN_REDUCTIONS = (
    Reduce.ROLLOUT_MEAN,
    Reduce.TOKEN_MEAN,
    Reduce.MEAN,
    Reduce.SUM,
    Reduce.MIN,
    Reduce.MAX,
    Reduce.QUANTILES,
)


def _check_reduce(spec: FieldSpec) -> None:
    """A metric that no reduction could make would be left out without a word."""
    if spec.reduce is Reduce.NONE:
        return
    allowed = {Scope.TOKEN: TOKEN_REDUCTIONS, Scope.SAMPLE: SAMPLE_REDUCTIONS}.get(spec.scope, ())
    if spec.reduce not in allowed:
        raise RolloutDataError(
            f"declare_field({spec.name!r}, scope={spec.scope}, reduce={spec.reduce}): a field of "
            "this scope can be reduced by "
            f"{', '.join(map(str, allowed)) or 'nothing'}."
        )
    if spec.scope is Scope.TOKEN and spec.rows is not Rows.RESPONSE:
        raise RolloutDataError(
            f"declare_field({spec.name!r}, reduce={spec.reduce}) needs one value per response "
            "token (rows=Rows.RESPONSE)."
        )
    if spec.wire_dtype is None and spec.shipped:
        raise RolloutDataError(
            f"declare_field({spec.name!r}, reduce={spec.reduce}) needs numbers: give wire_dtype, "
            "for example 'float32'."
        )
