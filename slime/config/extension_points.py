"""Every place where a run calls a user's function: the option that names it, how it is called, and
what it returns.

The help of the options, the check before the run, docs/hooks.md and its tests read this table.

    EXTENSION_POINTS["custom_rm_path"].signature                  "async (args, sample)"
    problem_of(EXTENSION_POINTS["custom_rm_path"], reward)        None, or what is wrong with
                                                                  `reward` and what to write
"""

from __future__ import annotations

import dataclasses
import enum
import inspect


class Mode(enum.Enum):
    """How the caller treats what the function returns."""

    SYNC = "used as it is"
    ASYNC = "awaited"
    EITHER = "awaited where it is awaitable"


_DEFAULTS = {"evaluation": "=False"}  # as upstream's functions of these kinds have it


@dataclasses.dataclass(frozen=True)
class ExtensionPoint:
    """One option that names a function (or, with `methods`, a class).

    `arguments` are passed by position, `keywords` by keyword, `optional` by keyword to a function
    whose signature has them. `task` is the sentence of help; `called` says when, and in which
    process; `returns` what is done with the result.
    """

    option: str
    arguments: tuple[str, ...]
    task: str
    called: str
    returns: str
    keywords: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    mode: Mode = Mode.SYNC
    methods: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The option as it is written on the command line."""
        return "--" + self.option.replace("_", "-")

    @property
    def parameters(self) -> str:
        """The parameters as one writes them, for instance "(args, sample, *, rollout_id,
        evaluation)".
        """
        star = ["*"] if not self.arguments or self.mode is Mode.EITHER else []
        named = [
            name + _DEFAULTS.get(name, "=None" if name in self.optional else "")
            for name in self._by_keyword
        ]
        return f"({', '.join([*self.arguments, *star, *named])})"

    @property
    def _by_keyword(self) -> tuple[str, ...]:
        return (*self.keywords, *self.optional)

    @property
    def kind(self) -> str:
        """What the path must lead to."""
        if self.methods:
            return "Class"
        return "Async function" if self.mode is Mode.ASYNC else "Function"

    @property
    def help(self) -> str:
        """The sentence of help of the option."""
        result = "" if self.methods else f" -> {self.returns}"
        return f"{self.kind} {self.parameters}{result}: {self.task}"

    def declaration(self, name: str) -> str:
        """The line of Python that begins a function (or class) of this kind."""
        if self.methods:
            return f"class {name}: def __init__(self, {', '.join(self.arguments)})"
        return f"{'async ' if self.mode is Mode.ASYNC else ''}def {name}{self.parameters}"


_POINTS = (
    ExtensionPoint(
        "rollout_function_path",
        ("args", "rollout_id", "data_source"),
        "makes one rollout.",
        "once a rollout, in the rollout manager",
        (
            "list of groups, or RolloutFnTrainOutput; with evaluation=True dict of datasets, or "
            "RolloutFnEvalOutput"
        ),
        keywords=("evaluation",),
    ),
    ExtensionPoint(
        "eval_function_path",
        ("args", "rollout_id", "data_source"),
        "evaluates; without it --rollout-function-path is called with evaluation=True.",
        "at each evaluation, in the rollout manager",
        "dict of datasets, or RolloutFnEvalOutput",
        keywords=("evaluation",),
    ),
    ExtensionPoint(
        "data_source_path",
        ("args",),
        "hands out groups of samples.",
        "built once, in the rollout manager; get_samples(num_samples) once or more a rollout",
        "an object with the methods get_samples, add_samples, save, load and __len__",
        methods=("get_samples", "add_samples", "save", "load", "__len__"),
    ),
    ExtensionPoint(
        "custom_generate_function_path",
        ("args", "sample", "sampling_params"),
        "generates one sample.",
        "once a sample, in training and evaluation, many at a time on one event loop",
        "the Sample, or a list of them (fan-out)",
        optional=("evaluation",),
        mode=Mode.ASYNC,
    ),
    ExtensionPoint(
        "custom_rm_path",
        ("args", "sample"),
        (
            "scores in place of --rm-type; with --group-rm it gets the list of samples and returns "
            "a "
            "list of rewards."
        ),
        (
            "once a sample that passed the response gate (once a group with --group-rm), in "
            "training "
            "and evaluation"
        ),
        "number, or dict with --reward-key",
        mode=Mode.ASYNC,
    ),
    ExtensionPoint(
        "rollout_sample_hook_path",
        ("args", "sample"),
        "sees each generated sample before its reward; sync or async; may be repeated.",
        "once a sample after its generation, in training and evaluation",
        "Sample in its place, or None to keep it",
        optional=("rollout_id", "evaluation"),
        mode=Mode.EITHER,
    ),
    ExtensionPoint(
        "dynamic_sampling_filter_path",
        ("args", "samples"),
        "keeps or drops a finished group; dropped groups are replaced by new ones.",
        "once a scored group, in training",
        "DynamicFilterOutput, or bool (True keeps)",
    ),
    ExtensionPoint(
        "buffer_filter_path",
        ("args", "rollout_id", "buffer", "num_samples"),
        (
            "takes at most num_samples groups out of the buffer of groups that were given back; "
            "default: the oldest first."
        ),
        "whenever groups are fetched while the buffer has some; rollout_id is None",
        "list of groups",
    ),
    ExtensionPoint(
        "rollout_sample_filter_path",
        ("args", "groups"),
        "sets remove_sample on members of the final groups.",
        "once a rollout, with the groups that will train",
        "None",
    ),
    ExtensionPoint(
        "rollout_all_samples_process_path",
        ("args", "all_groups", "data_source"),
        "sees every group of the rollout, dropped ones too.",
        "once a rollout, after it is complete",
        "None",
    ),
    ExtensionPoint(
        "custom_reward_post_process_path",
        ("args", "samples"),
        "normalizes the rewards in place of slime.",
        "once a rollout, with all samples that train",
        "(raw_rewards, rewards)",
    ),
    ExtensionPoint(
        "custom_convert_samples_to_train_data_path",
        ("args", "samples"),
        "makes the train data in place of slime.",
        "once a rollout, with all samples that train",
        "dict of lists with one entry per sample",
    ),
    ExtensionPoint(
        "custom_rollout_log_function_path",
        ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
        "logs a rollout.",
        "once a rollout, in the rollout manager",
        "bool; True replaces the rollout's own log",
    ),
    ExtensionPoint(
        "custom_eval_rollout_log_function_path",
        ("rollout_id", "args", "data", "extra_metrics"),
        "logs an evaluation.",
        "at each evaluation, in the rollout manager",
        "bool; True replaces the evaluation's own log",
    ),
    ExtensionPoint(
        "custom_megatron_init_path",
        ("args",),
        "prepares a training rank.",
        "once on every training rank, after the model-parallel groups exist",
        "None",
    ),
    ExtensionPoint(
        "custom_model_provider_path",
        (),
        (
            "builds the model in place of slime; its layers are Megatron's, and its output layer "
            "is "
            "replaced for a critic."
        ),
        "once per virtual pipeline stage on every training rank, before weights are loaded",
        "this rank's part of the model",
        keywords=("pre_process", "post_process"),
        optional=("vp_stage",),
    ),
    ExtensionPoint(
        "custom_megatron_before_log_prob_hook_path",
        ("args", "model", "store_prefix"),
        "sees the model before each pass that computes log-probs or values.",
        "before each such pass on every training rank; store_prefix is ref_, teacher_ or empty",
        "None",
    ),
    ExtensionPoint(
        "custom_megatron_before_train_step_hook_path",
        ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
        "sees model, optimizer and schedule before each optimizer step.",
        "before each optimizer step on every training rank",
        "None",
    ),
    ExtensionPoint(
        "rollout_data_postprocess_path",
        ("args", "rollout_id", "rollout_data"),
        (
            "changes numbers of the local batch, or masks tokens, between advantages and training; "
            "tokens, lengths and micro-batches stay."
        ),
        "once a rollout on every training rank",
        "None",
    ),
    ExtensionPoint(
        "custom_advantage_function_path",
        ("args", "rollout_data"),
        'sets rollout_data["advantages"] and rollout_data["returns"] in place of the estimator.',
        "once a rollout on every training rank of the last pipeline stage",
        "None",
    ),
    ExtensionPoint(
        "custom_loss_function_path",
        ("args", "batch", "logits", "sum_of_sample_mean"),
        "is the loss of --loss-type custom_loss.",
        "once a micro-batch on every training rank of the last pipeline stage",
        "(loss, metrics)",
    ),
    ExtensionPoint(
        "custom_tis_function_path",
        (),
        "corrects the policy loss in place of truncated importance sampling.",
        "once a micro-batch with --use-tis or --get-mismatch-metrics",
        "(pg_loss, loss_masks, metrics)",
        keywords=(
            "args",
            "pg_loss",
            "train_log_probs",
            "rollout_log_probs",
            "loss_masks",
            "total_lengths",
            "response_lengths",
        ),
    ),
    ExtensionPoint(
        "custom_pg_loss_reducer_function_path",
        ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
        "makes the reducer of the policy loss.",
        "once a micro-batch on every training rank of the last pipeline stage",
        "function from one value per token to a scalar",
        optional=("sample_denoms",),
    ),
    ExtensionPoint(
        "custom_update_weight_post_write_path",
        ("args", "version_dir", "rollout_engines"),
        "is called after an update of the engines through the disk.",
        "after each weight update with --update-weight-transport disk, on one training rank",
        "None",
    ),
)
EXTENSION_POINTS: dict[str, ExtensionPoint] = {point.option: point for point in _POINTS}


def help_of(option: str) -> str:
    """The sentence of help of an option that names a user's function."""
    return EXTENSION_POINTS[option].help


def problem_of(point: ExtensionPoint, function: object) -> str | None:
    """What keeps `function` from being called as `point` calls it, and the line to write; None when
    nothing does.

    An async function is one by `async def`, or by an annotation that says that it returns an
    awaitable.
    """
    name = getattr(
        function, "__name__", type(function).__name__ if callable(function) else "function"
    )
    write = f" Write: {point.declaration(name)}"
    if not callable(function):
        return f"it is {_article(type(function).__name__)} and cannot be called.{write}"
    if point.methods:
        missing = [method for method in point.methods if not hasattr(function, method)]
        if inspect.isclass(function) and missing:
            return (
                f"class {name} has no {', no '.join(missing)}. It needs the methods "
                f"{', '.join(point.methods)}."
            )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin may have none
        return None
    parameters = signature.parameters
    passed = [*point.keywords, *(key for key in point.optional if key in parameters)]
    try:
        signature.bind(*point.arguments, **dict.fromkeys(passed))
    except TypeError as error:
        shown = f"{name}({', '.join(map(_without_annotation, parameters.values()))})"
        return f"{shown} cannot be called with {point.parameters}: {error}.{write}"
    if point.mode is Mode.ASYNC and not (
        _is_async(inspect.unwrap(function)) or _returns_awaitable(signature)
    ):
        return f"{name} is not async, but its result is awaited.{write}"
    if point.mode is Mode.SYNC and _is_async(function):
        return f"{name} is async, but its result is not awaited.{write}"
    return None


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _without_annotation(parameter: inspect.Parameter) -> str:
    return str(parameter.replace(annotation=inspect.Parameter.empty))


def _is_async(function: object) -> bool:
    call = getattr(type(function), "__call__", None)  # noqa: B004 - an object may have `async def __call__`
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _returns_awaitable(signature: inspect.Signature) -> bool:
    result = signature.return_annotation
    text = result if isinstance(result, str) else getattr(result, "__name__", str(result))
    return text.split("[")[0].split(".")[-1] in ("Awaitable", "Coroutine", "Future", "Task")
