"""Finds parallel layouts that cannot work, before any process starts. Pure: plain values in,
messages out.
"""

from __future__ import annotations

import argparse
import dataclasses


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the rules need. Built from `args` by `layout_problems`; None means "not given"."""

    world_size: int | None
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int | None
    sequence_parallel: bool
    layers_per_virtual_stage: int | None
    num_layers: int | None
    num_attention_heads: int | None
    num_query_groups: int | None
    ffn_hidden_size: int | None
    num_moe_experts: int | None
    moe_token_dispatcher_type: str | None
    recompute_granularity: str | None
    recompute_method: str | None
    recompute_num_layers: int | None


def layout_problems(args: argparse.Namespace, *, world_size: int | None = None) -> list[str]:
    """Returns one sentence per reason why `args`' parallel layout cannot train: flags, values, and
    a value that works.

    world_size: number of training ranks; None skips the rules about it. `args` may hold None for
    model-shape fields that are not known yet; their rules are skipped.
    """
    given = vars(args)
    layout = Layout(
        world_size=world_size,
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        cp=args.context_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size,
        sequence_parallel=args.sequence_parallel,
        layers_per_virtual_stage=args.num_layers_per_virtual_pipeline_stage,
        num_layers=given.get("num_layers"),
        num_attention_heads=given.get("num_attention_heads"),
        num_query_groups=given.get("num_query_groups"),
        ffn_hidden_size=given.get("ffn_hidden_size"),
        num_moe_experts=given.get("num_moe_experts"),
        moe_token_dispatcher_type=given.get("moe_token_dispatcher_type"),
        recompute_granularity=given.get("recompute_granularity"),
        recompute_method=given.get("recompute_method"),
        recompute_num_layers=given.get("recompute_num_layers"),
    )
    rules = (_sizes, _tensor_parallel, _pipeline, _experts, _recompute)
    return [problem for rule in rules for problem in rule(layout)]


def divisors(number: int) -> list[int]:
    """Returns all positive divisors of `number`, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _choices(values: list[int]) -> str:
    return " or ".join(str(value) for value in values[:6])


def _sizes(layout: Layout) -> list[str]:
    named = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--context-parallel-size": layout.cp,
        "--expert-model-parallel-size": layout.ep,
    }
    problems = [
        f"{flag} is {value}; it must be at least 1." for flag, value in named.items() if value < 1
    ]
    if problems or layout.world_size is None:
        return problems
    model = layout.tp * layout.pp * layout.cp
    if layout.world_size % model:
        problems.append(
            f"{layout.world_size} training ranks do not divide into groups of tensor {layout.tp} x "
            f"pipeline {layout.pp} x context {layout.cp} "
            f"= {model} ranks. Use {model} or {2 * model} ranks, or a smaller parallel size."
        )
    expert = layout.ep * (layout.etp or layout.tp) * layout.pp
    if layout.ep > 1 and layout.world_size % expert:
        problems.append(
            f"{layout.world_size} training ranks do not divide into groups of expert {layout.ep} x "
            f"expert-tensor {layout.etp or layout.tp} x "
            f"pipeline {layout.pp} = {expert} ranks. Use {expert} or {2 * expert} ranks, or --expert-model-parallel-size 1."
        )
    return problems


def _tensor_parallel(layout: Layout) -> list[str]:
    problems = []
    heads, groups = layout.num_attention_heads, layout.num_query_groups
    if heads and (heads % layout.tp or (groups and groups % layout.tp)):
        common = [d for d in divisors(heads) if not groups or groups % d == 0]
        problems.append(
            f"--tensor-model-parallel-size {layout.tp} does not divide the model's {heads} "
            f"attention heads and {groups or heads} key/value heads. "
            f"Use {_choices(common)}."
        )
    if layout.ffn_hidden_size and layout.ffn_hidden_size % layout.tp:
        problems.append(
            f"--tensor-model-parallel-size {layout.tp} does not divide the MLP's "
            f"{layout.ffn_hidden_size} channels. "
            f"Use {_choices(divisors(layout.ffn_hidden_size))}."
        )
    return problems


def _pipeline(layout: Layout) -> list[str]:
    problems: list[str] = []
    per_stage = layout.layers_per_virtual_stage
    if layout.num_layers and layout.num_layers % layout.pp:
        return [
            f"--pipeline-model-parallel-size {layout.pp} does not divide the model's "
            f"{layout.num_layers} layers. "
            f"Use {_choices(divisors(layout.num_layers))}."
        ]
    if per_stage is None:
        return problems
    if layout.pp == 1:
        problems.append(
            f"--num-layers-per-virtual-pipeline-stage {per_stage} needs "
            "--pipeline-model-parallel-size of at least 2; it is 1. Drop it."
        )
    elif layout.num_layers:
        layers_here = layout.num_layers // layout.pp
        if per_stage < 1 or layers_here % per_stage or per_stage == layers_here:
            working = [d for d in divisors(layers_here) if d < layers_here]
            advice = (
                f"Use {_choices(working)}."
                if working
                else "Drop it: one layer per stage cannot be interleaved."
            )
            problems.append(
                f"--num-layers-per-virtual-pipeline-stage {per_stage} does not split the "
                f"{layers_here} layers of a pipeline stage into at "
                f"least two equal parts. {advice}"
            )
    return problems


def _experts(layout: Layout) -> list[str]:
    problems = []
    experts = layout.num_moe_experts
    if layout.ep > 1 and not experts:
        problems.append(
            f"--expert-model-parallel-size {layout.ep} needs a mixture-of-experts model; this one "
            "is dense. Use 1."
        )
    if experts and experts % layout.ep:
        problems.append(
            f"--expert-model-parallel-size {layout.ep} does not divide the model's {experts} "
            f"experts. Use {_choices(divisors(experts))}."
        )
    if experts and layout.ep == 1 and layout.etp not in (None, layout.tp):
        problems.append(
            f"--expert-tensor-parallel-size {layout.etp} differs from --tensor-model-parallel-size "
            f"{layout.tp} without expert parallelism: "
            f"Megatron-core then leaves the experts' gradients unreduced. Use {layout.tp}, or --expert-model-parallel-size of at least 2."
        )
    if experts and layout.tp > 1 and not layout.sequence_parallel:
        problems.append(
            f"A mixture-of-experts model with --tensor-model-parallel-size {layout.tp} trains only "
            "with --sequence-parallel. Add it."
        )
    needs_alltoall = layout.pp > 1 or experts
    if needs_alltoall and layout.moe_token_dispatcher_type not in (None, "alltoall"):
        problems.append(
            f"--moe-token-dispatcher-type {layout.moe_token_dispatcher_type} cannot take rows of "
            "different lengths. Use alltoall."
        )
    return problems


def _recompute(layout: Layout) -> list[str]:
    if layout.recompute_granularity == "full" and (
        not layout.recompute_method or not layout.recompute_num_layers
    ):
        return [
            "--recompute-granularity full needs --recompute-method (uniform or block) and "
            "--recompute-num-layers. "
            "Add --recompute-method uniform --recompute-num-layers 1."
        ]
    if layout.recompute_granularity != "full" and layout.recompute_method:
        return [
            (
                "--recompute-method needs --recompute-granularity full. Add it, or drop "
                "--recompute-method."
            )
        ]
    return []
