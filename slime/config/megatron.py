"""Megatron's options: the flags of Megatron's command line, and every simple field of
megatron-core's config dataclasses.

The fields are read from megatron-core's source with `ast` (name, type, default, the string below
the field as help), so that torch is never imported to parse a command line. A field that is not
given is None: then the Hugging Face config decides for model shape, and megatron-core's own default
for everything else.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

from slime.config.extension_points import help_of
from slime.config.option import OptionSpec, flag_of, option
from slime.exceptions import ConfigError
from slime.tested_versions import requirement


@dataclasses.dataclass(frozen=True)
class ParallelOptions:
    """Parallel layout of training."""

    tensor_model_parallel_size: int = option(
        1, "Ranks that share each layer's matrices (TP).", minimum=1
    )
    pipeline_model_parallel_size: int = option(
        1, "Ranks that share the stack of layers (PP).", minimum=1
    )
    context_parallel_size: int = option(
        1, "Ranks that share the tokens of each sequence (CP).", minimum=1
    )
    expert_model_parallel_size: int = option(
        1, "Ranks that share the experts of each MoE layer (EP).", minimum=1
    )
    expert_tensor_parallel_size: int | None = option(
        None, "Ranks that share the matrices of one expert; None: the TP size.", minimum=1
    )
    sequence_parallel: bool = option(
        False, "Split layer norms and dropout over the TP ranks along the sequence; needs TP > 1."
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "Layers per virtual pipeline stage (interleaved schedule); None: off.", minimum=1
    )
    distributed_backend: str | None = option(
        None,
        "Collectives between training ranks; None: nccl with CUDA, gloo without.",
        choices=("nccl", "gloo"),
    )
    distributed_timeout_minutes: int = option(
        10,
        "A collective that waits longer than this ends the run with the stacks of all ranks.",
        minimum=1,
        maximum=1000000,
    )


@dataclasses.dataclass(frozen=True)
class ModelShapeOptions:
    """Model shape (taken from --hf-checkpoint; a flag that contradicts it is an error)."""

    seq_length: int | None = option(
        None,
        "Longest sequence the model is built for, tokens; None: max-position-embeddings.",
        minimum=1,
    )
    max_position_embeddings: int | None = option(
        None, "Longest position the model knows, tokens.", minimum=1
    )
    vocab_size: int | None = option(None, "Tokens in the vocabulary, before padding.", minimum=1)
    make_vocab_size_divisible_by: int = option(
        128, "The embedding table is padded to a multiple of this times the TP size.", minimum=1
    )
    position_embedding_type: str | None = option(
        None,
        "How positions enter the model.",
        choices=("learned_absolute", "rope", "mrope", "yarn", "none"),
    )
    rotary_base: float | None = option(None, "Base of the rotary frequencies (theta).", above=0)
    rotary_percent: float | None = option(
        None, "Share of each head that is rotated.", above=0, maximum=1
    )
    use_rope_scaling: bool | None = option(None, "Scale the rotary frequencies as Llama 3.1 does.")
    rope_scaling_factor: float | None = option(None, "Factor of that scaling.", above=0)
    untie_embeddings_and_output_weights: bool | None = option(
        None, "Separate weights for the embedding and the output layer."
    )
    swiglu: bool | None = option(None, "Gated MLP with SiLU.")
    normalization: str | None = option(
        None, "Kind of layer norm.", choices=("LayerNorm", "RMSNorm")
    )
    group_query_attention: bool | None = option(
        None, "Several query heads share one key/value head."
    )
    num_query_groups: int | None = option(None, "Key/value heads.", minimum=1)
    disable_bias_linear: bool | None = option(None, "No bias in linear layers.")
    add_qkv_bias: bool | None = option(None, "Bias in the query/key/value projection only (Qwen2).")
    qk_layernorm: bool | None = option(None, "Norm on queries and keys of each head (Qwen3).")


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """Optimizer and learning rate."""

    lr: float = option(1e-6, "Peak learning rate.", minimum=0)
    min_lr: float = option(0.0, "Learning rate at the end of the decay.", minimum=0)
    lr_decay_style: str = option(
        "linear",
        "Shape of the decay from lr to min-lr.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_warmup_iters: int = option(0, "Optimizer steps of linear warm-up.", minimum=0)
    lr_warmup_fraction: float | None = option(
        None,
        "Warm-up as a share of lr-decay-iters; excludes lr-warmup-iters.",
        minimum=0,
        maximum=1,
    )
    lr_warmup_init: float = option(0.0, "Learning rate at the first warm-up step.", minimum=0)
    lr_decay_iters: int | None = option(
        None, "Optimizer steps over which the rate decays; None: all steps of the run.", minimum=1
    )
    weight_decay: float = option(0.01, "Weight decay (decoupled for Adam).", minimum=0)
    start_weight_decay: float | None = option(
        None, "Weight decay at the first step; None: weight-decay.", minimum=0
    )
    end_weight_decay: float | None = option(
        None, "Weight decay at the last step; None: weight-decay.", minimum=0
    )
    weight_decay_incr_style: str = option(
        "constant",
        "How weight decay goes from its start to its end.",
        choices=("constant", "linear", "cosine"),
    )
    clip_grad: float = option(1.0, "Largest global gradient norm; 0 turns clipping off.", minimum=0)
    adam_beta1: float = option(0.9, "Adam's decay of the first moment.", minimum=0, below=1)
    adam_beta2: float = option(0.999, "Adam's decay of the second moment.", minimum=0, below=1)
    adam_eps: float = option(1e-8, "Adam's term for numerical stability.", minimum=0)
    use_distributed_optimizer: bool = option(
        False, "Shard the optimizer state over the data-parallel ranks."
    )


@dataclasses.dataclass(frozen=True)
class NumericsOptions:
    """Precision, recomputation and seed."""

    bf16: bool = option(False, "Train in bfloat16 with fp32 main weights.")
    fp16: bool = option(False, "Train in float16 with loss scaling and fp32 main weights.")
    seed: int = option(1234, "Seed of weights and dropout; rollouts have --rollout-seed.")
    recompute_granularity: str | None = option(
        None,
        "Recompute activations in the backward pass: whole layers, or the costly parts only.",
        choices=("full", "selective"),
    )
    recompute_method: str | None = option(
        None, "Which layers full recomputation covers.", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = option(
        None, "Layers per recomputation unit; goes with recompute-method.", minimum=1
    )


@dataclasses.dataclass(frozen=True)
class TrainDataPluginOptions:
    """Plug-ins between rollout and training."""

    custom_convert_samples_to_train_data_path: str | None = option(
        None, help_of("custom_convert_samples_to_train_data_path")
    )


# (config class, file below megatron/core, title of its group). The first that has a field wins.
SOURCES = (
    ("TransformerConfig", "transformer/transformer_config.py", "Megatron: transformer config"),
    ("ModelParallelConfig", "model_parallel_config.py", "Megatron: model-parallel config"),
    ("OptimizerConfig", "optimizer/optimizer_config.py", "Megatron: optimizer config"),
    (
        "DistributedDataParallelConfig",
        "distributed/distributed_data_parallel_config.py",
        "Megatron: data-parallel config",
    ),
)

# Fields which another option sets: a flag of their own would be a second truth.
NOT_FLAGS = {
    "virtual_pipeline_model_parallel_size": "follows from --num-layers-per-virtual-pipeline-stage",
    "gated_linear_unit": "set by --swiglu",
    "add_bias_linear": "set by --disable-bias-linear",
    "variable_seq_lengths": "always on where a pipeline needs it: rows differ in length",
    "perform_initialization": "weights come from a checkpoint",
    "use_cpu_initialization": "set by the accelerator",
    "barrier_with_L1_time": "timers are slime's own",
    "log_max_attention_logit": "needs a Megatron timer loop",
    "overlap_p2p_comm": (
        "on with --num-layers-per-virtual-pipeline-stage: batched messages of the "
        "interleaved schedule get mixed up"
    ),
    "batch_p2p_comm": "off with --num-layers-per-virtual-pipeline-stage, on without",
}

# What the model is built with on a CPU machine, where CUDA's kernels are not there. Another value
# is refused.
FIXED_ON_CPU: dict[str, Any] = {
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "moe_grouped_gemm": False,
}

_SCALARS = {"int": int, "float": float, "bool": bool, "str": str}
_OPTIONAL = re.compile(r"Optional\[(.*)\]")
_LIST = re.compile(r"(?:List|list)\[(\w+)\]")
_SCALAR_OR_LIST = re.compile(r"Union\[(\w+), (?:List|list)\[\1\]\]")


@dataclasses.dataclass(frozen=True)
class MegatronField:
    """One simple-typed field of a megatron-core config class, as its source declares it. `default`
    is source text.
    """

    name: str
    config_class: str
    kind: type
    many: bool
    unwrap: bool
    choices: tuple[Any, ...] | None
    default: str
    help: str


def megatron_core_folder() -> Path | None:
    """Returns the folder of the installed megatron-core, without importing it; None where it is not
    installed.
    """
    spec = importlib.util.find_spec("megatron")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(location) / "core" / "transformer").is_dir():
            return Path(location) / "core"
    return None


def fields_of_source(source: str, config_class: str) -> list[MegatronField]:
    """Returns the simple-typed fields of `config_class` in Python source text; callables, dtypes
    and objects are left out.

    Raises ConfigError when the class is not in the source.
    """
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == config_class:
            return _fields_of_class(node)
    raise ConfigError(
        f"megatron-core has no {config_class} where slime looks for it. Install "
        f"{requirement('megatron-core')}."
    )


def _fields_of_class(node: ast.ClassDef) -> list[MegatronField]:
    fields = []
    for index, statement in enumerate(node.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        parsed = _read_type(ast.unparse(statement.annotation))
        if parsed is None or statement.target.id.startswith("_"):
            continue
        following = node.body[index + 1] if index + 1 < len(node.body) else None
        kind, many, choices = parsed
        fields.append(
            MegatronField(
                name=statement.target.id,
                config_class=node.name,
                kind=kind,
                many=many,
                unwrap=many and "Union" in ast.unparse(statement.annotation),
                choices=choices,
                default=_default_text(statement.value),
                help=_text_of(following),
            )
        )
    return fields


def _text_of(statement: ast.stmt | None) -> str:
    """The words of a bare string below a field, its documentation by Megatron's custom."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return " ".join(str(statement.value.value).split())
    return ""


def _read_type(annotation: str) -> tuple[type, bool, tuple[Any, ...] | None] | None:
    match = _OPTIONAL.fullmatch(annotation)
    inner = match.group(1) if match else annotation
    if inner.startswith("Literal["):
        choices = tuple(ast.literal_eval("(" + inner[len("Literal[") : -1] + ",)"))
        return type(choices[0]), False, choices
    either = _SCALAR_OR_LIST.fullmatch(inner)
    if either and either.group(1) in _SCALARS:
        return _SCALARS[either.group(1)], True, None
    several = _LIST.fullmatch(inner)
    if several and several.group(1) in _SCALARS:
        return _SCALARS[several.group(1)], True, None
    if inner in _SCALARS:
        return _SCALARS[inner], False, None
    return None


def _default_text(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "field":
        for keyword in value.keywords:
            if keyword.arg == "default":
                return ast.unparse(keyword.value)
        return "computed"
    return ast.unparse(value) if value is not None else "none"


@functools.lru_cache(maxsize=1)
def megatron_fields() -> tuple[MegatronField, ...]:
    """Returns the simple fields of all config classes in `SOURCES`, also where two classes share a
    name; empty without megatron-core.
    """
    folder = megatron_core_folder()
    if folder is None:
        return ()
    found: list[MegatronField] = []
    for config_class, path, _ in SOURCES:
        found += fields_of_source((folder / path).read_text(encoding="utf-8"), config_class)
    return tuple(found)


def megatron_specs(taken: frozenset[str]) -> list[OptionSpec]:
    """Returns one undecided (None) option per megatron-core field whose name and flag are not in
    `taken`.

    A field of several classes becomes one flag whose help names them all: the value goes to each.
    """
    titles = {config_class: title for config_class, _, title in SOURCES}
    classes_of: dict[str, list[str]] = {}
    for field in megatron_fields():
        classes_of.setdefault(field.name, []).append(field.config_class)
    specs, seen = [], set()
    for field in megatron_fields():
        if (
            field.name in seen
            or field.name in taken
            or field.name in NOT_FLAGS
            or flag_of(field.name) in taken
        ):
            continue
        seen.add(field.name)
        also = classes_of[field.name][1:]
        sentence = (
            re.split(r"(?<=[.!?])\s", field.help, maxsplit=1)[0]
            if field.help
            else f"megatron-core's {field.name}."
        )
        off_flag = "--no-" + flag_of(field.name)[2:] if field.kind is bool else None
        specs.append(
            OptionSpec(
                name=field.name,
                kind=field.kind,
                default=None,
                help=(
                    f"{sentence} [megatron-core default: "
                    f"{field.default}{'; also in ' + ', '.join(also) if also else ''}]"
                ),
                group=titles[field.config_class],
                flag=flag_of(field.name),
                off_flag=off_flag if off_flag not in taken else None,
                many=field.many,
                unwrap=field.unwrap,
                optional=True,
                choices=field.choices,
                source="megatron",
            )
        )
    return specs
