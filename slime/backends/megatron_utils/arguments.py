"""Upstream's checks of Megatron options: against the Hugging Face config, of the allgather layout
of context parallelism, and of the layout.

Imports nothing from Megatron, and nothing of slime before a function is called: callers load this
file by its path with stand-ins for Megatron.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.backends.megatron_utils.layout import layout_problems
from slime.config.cli import join_problems, parse_command_line
from slime.config.derive import apply_derived
from slime.config.specs import all_specs
from slime.exceptions import ConfigError
from slime.models.hf_folder import read_json
from slime.models.megatron_fields import contradictions
from slime.models.shape import read_model_shape

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# HF config name -> the Megatron option that must hold the same value
_SAME_VALUE = {
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_hidden_layers": "num_layers",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}
# both spellings of Megatron's norm epsilon
_NORM_EPSILON = ("norm_epsilon", "layernorm_epsilon")
DSA_ARCHITECTURES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")


def megatron_parse_args(
    extra_args_provider: Callable[[argparse.ArgumentParser], Any] | None,
    skip_hf_validate: bool = False,
) -> argparse.Namespace:
    """Returns the options of the process's command line, with those that
    `extra_args_provider(parser)` adds.

    Unless `skip_hf_validate`, options that contradict --hf-checkpoint/config.json raise;
    ConfigError for whatever else is wrong.
    """
    args = parse_command_line(None, extra_args_provider).args
    if not skip_hf_validate and args.hf_checkpoint is not None:
        problems = contradictions(vars(args), read_model_shape(args.hf_checkpoint))
        if problems:
            raise ConfigError(join_problems(problems))
    return set_default_megatron_args(args)


def set_default_megatron_args(args: argparse.Namespace) -> argparse.Namespace:
    """Gives `args` every option that it lacks, with its default, and returns it. What it has stays,
    None included.
    """
    import copy

    missing = {
        spec.name: copy.copy(spec.default)
        for spec in all_specs()
        if not hasattr(args, spec.name) and not spec.required
    }
    apply_derived(args, missing)
    return args


def validate_args(args: argparse.Namespace) -> None:
    """Raises ConfigError (a ValueError) with everything that makes the parallel layout of `args`
    impossible for its model.
    """
    ranks = args.actor_num_nodes * args.actor_num_gpus_per_node
    problems = layout_problems(args, world_size=ranks or None)
    if problems:
        raise ConfigError(join_problems(problems))


def _hf_validate_args(
    args: argparse.Namespace, hf_config: PretrainedConfig | Mapping[str, Any]
) -> None:
    """AssertionError that lists every option of `args` that contradicts `hf_config` (an object or a
    mapping; its `text_config` if it has one).

    Compared: hidden size, heads, layers, the dense MLP's width (where a layer is dense), expert and
    shared-expert width, tied embeddings, norm epsilon, rope base. What either side lacks is not
    compared.
    """
    given = vars(args)
    problems = [
        f"{name} is {given[name]!r} in the options and {expected!r} in the Hugging Face config"
        for name, expected in _expected_values(given, _config_values(hf_config))
        if name in given and not _equal(given[name], expected)
    ]
    assert not problems, "hf_validate_args failed: " + "; ".join(problems) + "."


def _config_values(config: PretrainedConfig | Mapping[str, Any]) -> Mapping[str, Any]:
    values = config if isinstance(config, Mapping) else vars(config)
    inner = values.get("text_config")
    return values if inner is None else _config_values(inner)


def _expected_values(
    given: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yields (Megatron option, value that the config asks for)."""
    for hf_name, name in _SAME_VALUE.items():
        if config.get(hf_name) is not None:
            yield name, config[hf_name]
    if config.get("intermediate_size") is not None and _has_dense_layer(given, config):
        yield "ffn_hidden_size", config["intermediate_size"]
    if config.get("tie_word_embeddings") is not None:
        yield "untie_embeddings_and_output_weights", not config["tie_word_embeddings"]
    if config.get("rms_norm_eps") is not None:
        yield from ((name, config["rms_norm_eps"]) for name in _NORM_EPSILON)
    parameters = config.get("rope_parameters") or {}
    base = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
    base = config.get("rope_theta") if base is None else base
    if base is not None:
        yield "rotary_base", base


def _has_dense_layer(given: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether the model has an MLP that is no expert: it is no MoE model, or `moe_layer_freq`
    leaves some layers dense.
    """
    if config.get("moe_intermediate_size") is None:
        return True
    pattern = given.get("moe_layer_freq", 1)
    return (
        0 in pattern
        if isinstance(pattern, list | tuple)
        else isinstance(pattern, int) and pattern > 1
    )


def _equal(given: Any, expected: Any) -> bool:
    if isinstance(given, float) or isinstance(expected, float):
        return given is not None and math.isclose(float(given), float(expected), rel_tol=1e-9)
    return given == expected


def _validate_allgather_cp_supported(
    args: argparse.Namespace, hf_config: PretrainedConfig | Mapping[str, Any] | None = None
) -> None:
    """ValueError where `allgather_cp` is on above context-parallel size 1 for a model without DSA
    attention (`DSA_ARCHITECTURES`).

    Without `hf_config` the one of `args.hf_checkpoint` is read.
    """
    given = vars(args)
    if not given.get("allgather_cp") or given.get("context_parallel_size", 1) <= 1:
        return
    if hf_config is None and given.get("hf_checkpoint"):
        hf_config = read_json(Path(given["hf_checkpoint"]) / "config.json")
    values = (
        {}
        if hf_config is None
        else hf_config
        if isinstance(hf_config, Mapping)
        else vars(hf_config)
    )
    architectures = values.get("architectures") or []
    if not set(architectures) & set(DSA_ARCHITECTURES):
        raise ValueError(
            f"--allgather-cp with --context-parallel-size {given['context_parallel_size']} is only "
            "supported for DSA attention models "
            f"({', '.join(DSA_ARCHITECTURES)}), not for {list(architectures)}. Leave --allgather-cp out."
        )
