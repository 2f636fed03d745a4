"""Upstream's paths after a move: each can be imported first, and a patch of a name there acts.

A path that became a door must be the module itself under another name. A copy of its names imports
as well, but a patch of the copy changes nothing: the code that runs looks the name up elsewhere.
"""

import ast
import collections
import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

from interface_check import read_table  # noqa: E402
from support.patched_calls import (  # noqa: E402
    MODEL_SIZES,
    Patch,
    advantages_call,
    dataset_call,
    dump_train_data,
    generation_call,
    given,
    is_reached,
    loss_call,
    manager_call,
    media_call,
    on_rank,
    read_dataset,
    read_prompts,
    schedule_call,
    start_call,
    state_call,
    step_call,
    supervised_call,
    tokenizer_call,
    train_call,
    worker_call,
)
from support.rollout_args import rollout_args  # noqa: E402

from slime.utils.types import Sample  # noqa: E402

NUM_GPUS = 0


def names_by_module() -> dict[str, list[str]]:
    """{module path of upstream: the names that users import from it}, of the table's rows that must
    hold.
    """
    found: dict[str, list[str]] = collections.defaultdict(list)
    for row in read_table():
        if row.kind != "name" or row.reason is not None:
            continue
        parts = row.name.split(".")
        while not _is_module(".".join(parts)):
            parts.pop()
        found[".".join(parts)] += row.name.split(".")[len(parts) :][:1]
    return dict(found)


def _is_module(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        return False


# --- imports --------------------------------------------------------------------------------------

# Third-party packages are loaded once; each case runs in a child that has loaded nothing of slime.
RUN_EACH = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import aiohttp, megatron.core.parallel_state, numpy, orjson, ray, torch
assert not any(name.partition(".")[0] == "slime" for name in sys.modules)
for title, code in json.load(sys.stdin).items():
    child = os.fork()
    if child == 0:
        try:
            exec(code, {"__name__": "user"})
        except BaseException as error:
            print(f"{title}: {type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(f"{title}: the process died")
print("done")
"""

IMPORT = """
import sys
{imports}
parent, _, name = "{path}".rpartition(".")
assert getattr(sys.modules[parent], name) is sys.modules["{path}"], "the package has another module under this name"
"""

STAND_IN_FOR_MEGATRON = """
import sys, types, torch
for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
    del sys.modules[name]
megatron, core, mpu = (types.ModuleType(name) for name in ("megatron", "megatron.core", "megatron.core.mpu"))
megatron.core, core.mpu, mpu.get_context_parallel_world_size = core, mpu, lambda: 1
sys.modules.update({module.__name__: module for module in (megatron, core, mpu)})
from slime.utils.ppo_utils import get_reinforce_plus_plus_returns
returns = get_reinforce_plus_plus_returns([1.0], [torch.zeros(2)], [torch.ones(2)], [2], [3], 0.0, 0.5)
assert [values.tolist() for values in returns] == [[0.5, 1.0]], returns
"""

STAND_IN_FOR_PROCESSING = """
import sys, types
stand_in = types.ModuleType("slime.utils.processing_utils")
stand_in.process_vision_info = lambda messages, processor: {"images": ["from the stand-in"]}
sys.modules[stand_in.__name__] = stand_in
from slime.utils.data import filter_long_prompt
from slime.utils.types import Sample
tokenizer = types.SimpleNamespace(apply_chat_template=lambda messages, **_: "text")
processor = lambda text, images: {"input_ids": [[0] * len(images[0])]}
samples = [Sample(prompt=[{"role": "user", "content": "a"}], multimodal_inputs={"images": [1]})]
assert filter_long_prompt(samples, tokenizer, processor, 17) == samples
assert filter_long_prompt(samples, tokenizer, processor, 16) == []
"""


def test_each_path_can_be_the_first_that_is_imported():
    """A user's script imports the one path that it needs, with every name there; a test puts a
    stand-in in place of a module before that.
    """
    paths = {path: sorted(set(names)) for path, names in names_by_module().items()}
    assert len(paths) > 50
    cases = {
        "a stand-in for megatron": STAND_IN_FOR_MEGATRON,
        "a stand-in for slime.utils.processing_utils": STAND_IN_FOR_PROCESSING,
    }
    for path, names in paths.items():
        cases[path] = IMPORT.format(
            path=path,
            imports=f"from {path} import {', '.join(names)}" if names else f"import {path}",
        )
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.stdout.splitlines() == ["done"], done.stdout + done.stderr[-2000:]


# Names that a path imports from the module that defines them: a patch of such a name acts in the
# code of this path alone.
COPIES = """
slime.backends.megatron_utils.hf_to_megatron: SafetensorReader
slime.backends.megatron_utils.loss: _maybe_capture_log_probs compute_policy_loss drain_captured_log_probs enable_log_prob_capture
slime.backends.megatron_utils.loss: icepop_function vanilla_tis_function
slime.observability.tensorboard_utils: _TensorboardAdapter
slime.observability.train_metric_utils: gather_and_reduce_log_dict reduce_train_step_metrics rollout_log_metric_contribution
slime.ray.rollout: _compute_top_p_kept_vocab_metrics _log_eval_rollout_data _log_rollout_data _validate_rollout_id_annotated
slime.ray.rollout: _validate_rollout_routed_experts_for_replay call_rollout_fn load_debug_rollout_data start_rollout_servers
slime.ray.rollout: validate_rollout_id_annotated
slime.ray.train_actor: clear_memory
slime.rollout.data_source: Sample
slime.rollout.rm_hub: get_deepscaler_rule_based_reward grade_answer_verl
slime.rollout.sft_rollout: MultiTurnLossMaskGenerator
slime.rollout.sglang_rollout: load_function
slime.utils.data: _parse_generalized_path
"""


def test_no_further_path_is_a_copy_of_another():
    """A function or class that is replaced through its path is replaced in the module that defines
    it, whatever that module is called.
    """
    listed = {
        f"{path}.{name}"
        for path, _, names in (line.partition(": ") for line in COPIES.split("\n") if line)
        for name in names.split()
    }
    found = set()
    for path, names in names_by_module().items():
        module = importlib.import_module(path)
        for name in names:
            value = inspect.unwrap(getattr(module, name))
            if inspect.isfunction(value) or inspect.isclass(value):
                with mock.patch.object(module, name) as replaced:
                    if getattr(sys.modules[value.__module__], value.__name__) is not replaced:
                        found.add(f"{path}.{name}")
    assert sorted(found - listed) == [], (
        "make the path a door: the module itself in sys.modules, not its names"
    )
    assert sorted(listed - found) == [], "no copies any more: remove them from COPIES"


def test_the_policy_loss_is_found_in_its_file():
    """Users' tests read loss.py as a file: the function stands there, and the clipped loss is
    called by its name.
    """
    import slime.backends.megatron_utils as package

    tree = ast.parse((Path(package.__path__[0]) / "loss.py").read_text(encoding="utf-8"))
    assert "policy_loss_function" in {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    assert "compute_policy_loss" in {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }


# --- patches --------------------------------------------------------------------------------------


METRICS = {
    "rewards": [1.0],
    "samples": [Sample(index=0, reward=1.0, tokens=[1, 2], response_length=1, response="a")],
}
PLACEMENT = SimpleNamespace(actor_num_nodes=1, actor_num_gpus_per_node=1, rollout_num_gpus=1, debug_train_only=False, debug_rollout_only=False,
                            colocate=False, rollout_external=False, kl_coef=0.0, use_kl_loss=False, use_opd=False, opd_type=None,
                            megatron_config_path=None)  # fmt: skip
MEAN = {
    "rewards": [1.0, 0.0],
    "raw_reward": [1.0, 0.0],
    "response_lengths": [1, 1],
    "total_lengths": [2, 2],
    "loss_masks": [[1], [1]],
}

MEGATRON, ROLLOUT, UTILS, SEEN = (
    "slime.backends.megatron_utils",
    "slime.rollout",
    "slime.utils",
    "slime.observability",
)
LOSS, MODEL, CP, DATA = (
    f"{MEGATRON}.loss",
    f"{MEGATRON}.model",
    f"{MEGATRON}.cp_utils",
    f"{MEGATRON}.data",
)
MANAGER, SGLANG, PLACE = (
    "slime.ray.rollout",
    f"{ROLLOUT}.sglang_rollout",
    "slime.ray.placement_group",
)
MPU = "megatron.core.mpu"

PATCHES = [
    # context parallelism: Megatron's answers and torch's collectives are asked for at call time
    Patch(f"{MPU}.get_context_parallel_world_size", f"{CP}.slice_with_cp", given(torch.arange(4), 0)),
    Patch(f"{CP}.get_logits_and_tokens_offset_with_cp", f"{CP}.slice_log_prob_with_cp", on_rank(given([0.0] * 3, 5, 3), cp_size=2)),
    Patch(f"{CP}.slice_with_cp", f"{CP}.prepare_routed_experts_for_routing_replay", on_rank(given(
        [torch.zeros(3, 1, 1)], [torch.zeros(4)], num_experts=2, data_pad_size_multiplier=1, sequence_parallel=False, allgather_cp=False))),
    Patch("torch.distributed.nn.all_reduce", f"{CP}.all_gather_with_cp", on_rank(given(torch.zeros(1), 5, 3), cp_size=2)),
    Patch("torch.distributed.all_reduce", f"{CP}.reduce_train_step_metrics", given(
        [{"keys": ["a"], "values": torch.zeros(2)}], calculate_per_token_loss=False, step_global_batch_size=1, cp_size=1, dp_with_cp_group=None)),
    # losses
    Patch(f"{LOSS}.compute_policy_loss", f"{LOSS}.policy_loss_function", loss_call(reducer=True)),
    Patch(f"{LOSS}.vanilla_tis_function", f"{LOSS}.policy_loss_function", loss_call(reducer=True, use_tis=True)),
    Patch(f"{LOSS}.get_rollout_top_p_logprob_kwargs", f"{LOSS}.policy_loss_function", loss_call(reducer=True, rollout_top_p=0.9)),
    Patch(f"{LOSS}._maybe_capture_log_probs", f"{LOSS}.policy_loss_function", loss_call(reducer=True)),
    Patch(f"{LOSS}.policy_loss_function", f"{LOSS}.loss_function", loss_call(loss_type="policy_loss")),
    Patch(f"{LOSS}.sft_loss_function", f"{LOSS}.loss_function", loss_call(loss_type="sft_loss")),
    Patch(f"{LOSS}.value_loss_function", f"{LOSS}.loss_function", loss_call(role="critic")),
    Patch(f"{LOSS}.get_sum_of_sample_mean", f"{LOSS}.loss_function", loss_call()),
    Patch(f"{LOSS}.load_function", f"{LOSS}.loss_function", loss_call(loss_type="custom_loss", custom_loss_function_path="m.f")),
    Patch(f"{LOSS}.get_responses", f"{LOSS}.get_values", on_rank(given(
        torch.zeros(1, 4, 1), args=None, unconcat_tokens=[torch.zeros(4)], total_lengths=[4], response_lengths=[2]))),
    Patch(f"{LOSS}.distributed_masked_whiten", f"{LOSS}.compute_advantages_and_returns", advantages_call(normalize_advantages=True)),
    Patch(f"{LOSS}.get_advantages_and_returns_batch", f"{LOSS}.compute_advantages_and_returns", advantages_call(advantage_estimator="ppo")),
    Patch(f"{LOSS}.load_function", f"{LOSS}.compute_advantages_and_returns", advantages_call(custom_advantage_function_path="m.f")),
    Patch(f"{LOSS}.apply_opd_kl_to_advantages", f"{LOSS}.compute_advantages_and_returns", advantages_call(use_opd=True, opd_kl_coef=1.0)),
    Patch(f"{UTILS}.ppo_utils.cut_to_local", f"{UTILS}.ppo_utils.get_reinforce_plus_plus_returns", on_rank(given(
        [1.0], [torch.zeros(2)], [torch.ones(2)], [2], [3], 0.0, 1.0))),
    Patch(f"{UTILS}.ppo_utils.cut_to_local", f"{UTILS}.ppo_utils.get_advantages_and_returns_batch", on_rank(given(
        [3], [2], [torch.zeros(2)], [torch.zeros(2)], 1.0, 1.0))),
    # steps and micro-batches
    Patch(f"{MODEL}.get_forward_backward_func", f"{MODEL}.train_one_step", step_call(get_forward_backward_func=None)),
    Patch(f"{MODEL}.get_batch", f"{MODEL}.train_one_step", step_call(get_batch=None)),
    Patch(f"{MODEL}.loss_function", f"{MODEL}.train_one_step", step_call(loss_function=None)),
    Patch(f"{MODEL}.reduce_train_step_metrics", f"{MODEL}.train_one_step", step_call()),
    Patch(f"{MODEL}.train_one_step", f"{MODEL}.train", train_call()),
    Patch(f"{MODEL}.log", f"{MODEL}.train", train_call(train_one_step=lambda *a, **k: ({}, 1.0))),
    Patch(f"{DATA}.DataIterator", f"{DATA}.get_data_iterator", on_rank(given({"micro_batch_indices": [[0]]}))),
    Patch(f"{MPU}.get_tensor_model_parallel_world_size", f"{DATA}.get_batch", given(None, None)),
    # the rollout manager
    Patch(f"{MANAGER}.load_function", f"{MANAGER}.RolloutManager", start_call),
    Patch(f"{MANAGER}.start_rollout_servers", f"{MANAGER}.RolloutManager", start_call),
    Patch(f"{MANAGER}.call_rollout_fn", f"{MANAGER}.RolloutManager", manager_call("generate")),
    Patch(f"{MANAGER}.validate_rollout_id_annotated", f"{MANAGER}.RolloutManager", manager_call("generate")),
    Patch(f"{MANAGER}.set_current_rollout_id", f"{MANAGER}.RolloutManager", manager_call("generate")),
    Patch(f"{MANAGER}.load_debug_rollout_data", f"{MANAGER}.RolloutManager", manager_call("generate", load_debug_rollout_data="{rollout_id}")),
    Patch(f"{MANAGER}.log", f"{MANAGER}.RolloutManager", manager_call("generate")),
    Patch(f"{MANAGER}.call_rollout_fn", f"{MANAGER}.RolloutManager", manager_call("eval")),
    Patch(f"{MANAGER}.ray.put", f"{MANAGER}.RolloutManager", manager_call("generate")),
    Patch(f"{SEEN}.rollout_metrics.log_rollout_data", f"{MANAGER}.RolloutManager", manager_call("generate")),
    Patch(f"{SEEN}.rollout_metrics.log_eval_rollout_data", f"{MANAGER}.RolloutManager", manager_call("eval")),
    Patch("ray.get", f"{UTILS}.data.process_rollout_data", given(None, [SimpleNamespace(inner=None)], 0, 1)),
    # rollout functions
    Patch(f"{SGLANG}.GenerateState", f"{SGLANG}.generate_and_rm", generation_call(state=False)),
    Patch(f"{SGLANG}.GenerateState", f"{SGLANG}.generate", generation_call(state=False)),
    Patch(f"{SGLANG}.GenerateState", f"{SGLANG}.generate_and_rm_group", generation_call(state=False, group=True)),
    Patch(f"{SGLANG}.GenerateState", f"{SGLANG}.abort", given(None, 0)),
    Patch(f"{SGLANG}.generate", f"{SGLANG}.generate_and_rm", generation_call()),
    Patch(f"{SGLANG}.load_function", f"{SGLANG}.generate_and_rm", generation_call(custom_generate_function_path="m.f")),
    Patch(f"{SGLANG}.generate_and_rm", f"{SGLANG}.generate_and_rm_group", generation_call(group=True)),
    Patch(f"{SGLANG}.generate", f"{SGLANG}.generate_and_rm_group", generation_call(group=True)),
    Patch(f"{SGLANG}.eval_rollout", f"{SGLANG}.generate_rollout", given(None, 0, None, evaluation=True)),
    Patch(f"{SGLANG}.GenerateState", f"{SGLANG}.generate_rollout", given(rollout_args(), 0, SimpleNamespace(get_samples=None))),
    Patch(f"{SGLANG}.GenerateState", f"{SGLANG}.generate_rollout_async", given(rollout_args(), 0, None)),
    Patch(f"{ROLLOUT}.sglang_streaming_rollout.GenerateState", f"{ROLLOUT}.sglang_streaming_rollout.generate_streaming", given(None, None, {})),
    Patch(f"{ROLLOUT}.fully_async_rollout._get_global_worker", f"{ROLLOUT}.fully_async_rollout.generate_rollout_fully_async", given(None, 0, None)),
    Patch(f"{ROLLOUT}.fully_async_rollout._get_global_worker", f"{ROLLOUT}.fully_async_rollout._generate_rollout_async", given(None, 0, None)),
    Patch(f"{ROLLOUT}.fully_async_rollout.AsyncRolloutWorker", f"{ROLLOUT}.fully_async_rollout._get_global_worker", given(rollout_args(), None)),
    Patch(f"{ROLLOUT}.fully_async_rollout.generate_and_rm_group", f"{ROLLOUT}.fully_async_rollout.AsyncRolloutWorker", worker_call),
    Patch(f"{ROLLOUT}.sample_hooks.load_function", f"{ROLLOUT}.sample_hooks.apply_rollout_sample_hooks", given(
        SimpleNamespace(rollout_sample_hook_path="m.f"), Sample())),
    Patch(f"{ROLLOUT}.sft_rollout.MultiTurnLossMaskGenerator", f"{ROLLOUT}.sft_rollout.generate_rollout", supervised_call),
    Patch(f"{ROLLOUT}.rm_hub.async_rm", f"{ROLLOUT}.rm_hub.batched_async_rm", given(rollout_args(), [Sample()])),
    Patch(f"{ROLLOUT}.rm_hub.f1.f1_score", f"{ROLLOUT}.rm_hub.async_rm", given(rollout_args(rm_type="f1"), Sample(response="a", label="a"))),
    Patch(f"{ROLLOUT}.rm_hub.gpqa.compute_gpqa_reward", f"{ROLLOUT}.rm_hub.async_rm", given(
        rollout_args(rm_type="gpqa"), Sample(response="A", label="A"))),
    Patch(f"{ROLLOUT}.rm_hub.math_dapo_utils.verify", f"{ROLLOUT}.rm_hub.math_dapo_utils.compute_score", given("Answer: 4", "4")),
    Patch(f"{ROLLOUT}.data_source.Dataset", f"{ROLLOUT}.data_source.RolloutDataSource", dataset_call()),
    Patch(f"{ROLLOUT}.data_source.load_function", f"{ROLLOUT}.data_source.RolloutDataSourceWithBuffer", dataset_call(buffer_filter_path="m.f")),
    # prompts
    Patch(f"{UTILS}.data.filter_long_prompt", f"{UTILS}.data.Dataset", read_dataset),
    Patch(f"{UTILS}.data.read_rows", f"{UTILS}.data.read_file", read_prompts),
    Patch(f"{UTILS}.data.prompt_text", f"{UTILS}.data.filter_long_prompt", given([Sample(prompt="a")], None, None, 4)),
    Patch(f"{UTILS}.processing_utils.process_vision_info", f"{UTILS}.data.filter_long_prompt", given(
        [Sample(prompt=[{"role": "user", "content": "a"}], multimodal_inputs={"images": [1]})],
        SimpleNamespace(apply_chat_template=None), object(), 4)),
    Patch(f"{UTILS}.processing_utils.load_tokenizer", f"{UTILS}.processing_utils.shared_tokenizer", tokenizer_call),
    Patch(f"{UTILS}.processing_utils.load_processor", f"{SGLANG}.GenerateState", state_call(multimodal_keys={"image": "images"})),
    Patch(f"{UTILS}.processing_utils.load_tokenizer", f"{SGLANG}.GenerateState", state_call()),
    Patch(f"{UTILS}.processing_utils.build_processor_kwargs", f"{SGLANG}.prepare_request", media_call),
    Patch(f"{UTILS}.processing_utils.encode_image_for_rollout_engine", f"{SGLANG}.prepare_request", media_call),
    Patch(f"{UTILS}.mask_utils.conversation_problem", f"{UTILS}.mask_utils.MultiTurnLossMaskGenerator", lambda entry, place: lambda: entry(
        mock.MagicMock(), "qwen").get_loss_mask([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])),
    Patch(f"{UTILS}.eval_config.ensure_dataset_list", f"{UTILS}.eval_config.build_eval_dataset_configs", given(SimpleNamespace(), None)),
    Patch(f"{UTILS}.eval_config.EvalDatasetConfig", f"{UTILS}.eval_config.build_eval_dataset_configs", given(
        SimpleNamespace(), [{"name": "a", "path": "p"}])),
    # from samples to shards
    Patch(f"{UTILS}.types.chosen_reward", f"{UTILS}.types.Sample", lambda entry, place: lambda: entry(reward={"a": 1.0}).get_reward_value(
        rollout_args(reward_key="a"))),
    Patch(f"{UTILS}.dp_schedule.first_fit_pack", f"{UTILS}.dp_schedule.build_dp_schedule", schedule_call()),
    Patch(f"{UTILS}.dp_schedule.expand_bins_by_splitting", f"{UTILS}.dp_schedule.build_dp_schedule", schedule_call(max_tokens_per_gpu=99)),
    Patch(f"{UTILS}.dp_schedule.get_seqlen_balanced_partitions", f"{UTILS}.dp_schedule.build_dp_schedule", schedule_call(balance_by_flops=True)),
    Patch(f"{UTILS}.seqlen_balancing.karmarkar_karp", f"{UTILS}.seqlen_balancing.get_seqlen_balanced_partitions", given([1, 2], 2, False)),
    Patch(f"{UTILS}.seqlen_balancing.get_seqlen_balanced_partitions", f"{UTILS}.seqlen_balancing.expand_bins_by_splitting", given(
        [[0, 1]], 2, [1, 2])),
    Patch(f"{UTILS}.flops_utils.calculate_lm_head_flops", f"{UTILS}.flops_utils.calculate_fwd_flops", given([4], MODEL_SIZES)),
    Patch(f"{UTILS}.train_dump_utils.write_train_dump", f"{UTILS}.train_dump_utils.save_debug_train_data", dump_train_data),
    # metrics, logs and timers
    Patch(f"{UTILS}.metric_utils.compression_ratio", f"{UTILS}.metric_utils.has_repetition", given("a" * 20000)),
    Patch(f"{SEEN}.rollout_metrics.compute_statistics", f"{SEEN}.rollout_metrics.compute_perf_metrics_from_samples", given(
        rollout_args(), [Sample(response_length=1, non_generation_time=1.0)], 2.0)),
    Patch(f"{SEEN}.rollout_metrics.compute_metrics_from_samples", f"{SEEN}.rollout_metrics.log_rollout_data", given(
        0, rollout_args(), METRICS["samples"], {}, 1.0)),
    Patch(f"{SEEN}.rollout_metrics.compute_perf_metrics_from_samples", f"{SEEN}.rollout_metrics.log_rollout_data", given(
        0, rollout_args(), METRICS["samples"], {}, 1.0)),
    Patch(f"{SEEN}.logging_utils.log", f"{SEEN}.rollout_metrics.log_rollout_data", given(0, rollout_args(), METRICS["samples"], {}, 1.0)),
    Patch(f"{SEEN}.logging_utils.init_tracking", f"{SEEN}.logging_utils.log", given(
        SimpleNamespace(use_wandb=False, run_dir="unused"), {"a": 1, "rollout/step": 0}, "rollout/step")),
    Patch(f"{SEEN}.train_metric_utils.gather_log_data", f"{SEEN}.train_metric_utils.log_rollout_data", on_rank(given(0, rollout_args(), MEAN))),
    Patch(f"{SEEN}.train_metric_utils.gather_log_data", f"{DATA}.log_rollout_data", on_rank(given(0, rollout_args(), MEAN))),
    Patch(f"{SEEN}.train_metric_utils.log_passrate", f"{SEEN}.train_metric_utils.log_rollout_data", on_rank(lambda entry, place: (
        place.monkeypatch.setattr(f"{SEEN}.train_metric_utils.gather_log_data", lambda *a: {}),
        lambda: entry(0, rollout_args(log_passrate=True), MEAN))[1])),
    Patch(f"{SEEN}.timer.Timer", f"{SEEN}.timer.timer", given("a")),
    Patch(f"{SEEN}.timer.Timer", f"{UTILS}.timer.timer", given("a")),
    # processes, ports and devices
    Patch(f"{PLACE}._get_placement_group_layout", f"{PLACE}.create_placement_groups", given(PLACEMENT)),
    Patch(f"{PLACE}._create_placement_group", f"{PLACE}.create_placement_groups", given(PLACEMENT)),
    Patch(f"{PLACE}.allocate_train_group", f"{PLACE}.create_actor_model", given(PLACEMENT, {"actor": None}, None)),
    Patch(f"{PLACE}.create_actor_model", f"{PLACE}.create_training_models", given(PLACEMENT, {}, None)),
    Patch("slime.ray.ray_actor.get_free_port", "slime.ray.ray_actor.RayActor._get_current_node_ip_and_free_port", given()),
    Patch("slime.ray.train_actor.clear_memory", "slime.ray.train_actor.TrainRayActor.clear_memory", given(None)),
    Patch(f"{UTILS}.memory_utils.available_memory", f"{UTILS}.memory_utils.print_memory", given("")),
    Patch(f"{UTILS}.memory_utils.get_accelerator", f"{UTILS}.memory_utils.clear_memory", given()),
    Patch(f"{UTILS}.accelerator._cpu", f"{UTILS}.accelerator.get_accelerator", lambda entry, place: (
        place.monkeypatch.setenv("SLIME_ACCELERATOR", "cpu"), entry.__wrapped__)[1]),
    Patch("torch.distributed.all_reduce", f"{UTILS}.distributed_utils.distributed_masked_whiten", lambda entry, place: (
        place.monkeypatch.setattr("torch.distributed.is_initialized", lambda: True),
        lambda: entry(torch.ones(2), torch.ones(2), process_group=object()))[1]),
    Patch(f"{UTILS}.async_utils.get_async_loop", f"{UTILS}.async_utils.run", given(None)),
    Patch(f"{UTILS}.http_utils.request_with_retries", f"{UTILS}.http_utils.post", given("http://h", {})),
    Patch(f"{UTILS}.http_utils.is_port_free", f"{UTILS}.http_utils.find_available_port", given(1)),
    Patch(f"{UTILS}.misc.is_port_free", f"{UTILS}.misc.get_free_port", given()),
    Patch("slime.backends.sglang_utils.external.get_server_info", "slime.backends.sglang_utils.external.discover_external_engines", given(["h:1"])),
]  # fmt: skip


@pytest.mark.parametrize("row", PATCHES, ids=lambda row: f"{row.patched} in {row.entry}")
def test_a_patch_acts(row, tmp_path, monkeypatch):
    """A replaced name takes part in the call that users make."""
    place = SimpleNamespace(tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert is_reached(row, place), (
        f"{row.entry} looks the name up elsewhere: {row.patched.rpartition('.')[0]} has a copy of "
        "it"
    )


def test_a_copy_is_told_from_a_door(monkeypatch):
    """The check itself: a module under another name and a door to it pass, a module with the same
    names does not.
    """
    from slime.utils import seqlen_balancing
    from slime.utils.doors import open_door

    names = {
        name: value for name, value in vars(seqlen_balancing).items() if not name.startswith("__")
    }
    copy, door = types.ModuleType("slime.a_copy"), types.ModuleType("slime.a_door")
    copy.__dict__.update(names)
    for path, module, expected in (
        ("alias", seqlen_balancing, True),
        ("a_door", door, True),
        ("a_copy", copy, False),
    ):
        monkeypatch.setitem(sys.modules, f"slime.{path}", module)
        monkeypatch.setattr("slime." + path, module, raising=False)
        if module is door:
            open_door("slime.a_door", seqlen_balancing)
        row = Patch(
            f"slime.{path}.karmarkar_karp",
            f"slime.{path}.get_seqlen_balanced_partitions",
            given([1, 2], 2, False),
        )
        assert is_reached(row, None) is expected
        assert {name: getattr(module, name) for name in names} == names, (
            "what the patch replaced is back"
        )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
