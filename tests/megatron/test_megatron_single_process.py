"""Megatron-core's GPTModel on the CPU in one process: the numbers of Hugging Face's eager model,
and edge cases."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import math
import subprocess

import pytest
import torch
import torch.distributed as dist
from support.megatron_worker import (
    LENGTHS,
    built,
    exported,
    fixed_tokens,
    folder_tensors,
    local_batch,
    log_probs_of,
    reference_run,
    train_steps,
)
from support.tiny_models import TinyCheckpoints, make_tiny_checkpoint

from slime.exceptions import ConfigError

NUM_GPUS = 0

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    **{family: {"family": family} for family in FAMILIES},
    "llama-llama3-rope-of-64-positions": {"family": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama-biases-linear-rope": {
        "family": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
    },
}


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return TinyCheckpoints(tmp_path_factory.mktemp("checkpoints"), MODELS)


def _packed(ids):
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [len(sequence) for sequence in ids]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return torch.cat(ids)[None], PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_of_a_packed_row_are_those_of_the_hugging_face_model(name, folders):
    """A row of eight packed sequences has the logits (1e-5) and gradients (1e-6) of one eager
    forward pass each."""
    from transformers import AutoModelForCausalLM

    from slime.backends.megatron_utils.local_params import local_parameters
    from slime.backends.megatron_utils.megatron_to_hf import _convert_to_hf_core

    folder, family = folders[name], MODELS[name]["family"]
    reference = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    ids = [torch.tensor(sequence) for sequence in fixed_tokens(reference.config.vocab_size)]
    expected = torch.cat([reference(sequence[None]).logits[0] for sequence in ids])
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected) / expected.numel()
    (expected * weight).sum().backward()

    with built(folder) as (args, model, optimizer, _):
        tokens, packed = _packed(ids)
        logits = model[0](
            input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=packed
        )[0]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        (logits * weight).sum().backward()
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        compared = 0
        for local in local_parameters(model):
            for name, gradient in _convert_to_hf_core(
                args, family, local.name, local.parameter.main_grad
            ):
                if name in gradients:
                    torch.testing.assert_close(
                        gradient,
                        gradients[name],
                        rtol=0,
                        atol=1e-6,
                        msg=lambda text, n=name: f"{n}: {text}",
                    )
                    compared += 1
    # transformers fuses experts in memory: only their gradients have no counterpart by name.
    assert compared == len([name for name in gradients if ".experts." not in name])


def test_scaled_rotary_frequencies_are_those_of_the_hugging_face_model(tmp_path):
    """Llama 3.1's scaled frequencies equal Hugging Face's; ignored, they would show on long
    contexts only."""
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    folder = make_tiny_checkpoint(
        tmp_path / "scaled", "llama", rope_parameters=scaling, head_dim=16
    )
    plain = make_tiny_checkpoint(
        tmp_path / "plain",
        "llama",
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
        head_dim=16,
    )
    expected, unscaled = reference_run(folder)["log_probs"], reference_run(plain)["log_probs"]
    with built(folder) as (args, model, *_):
        data, mine = local_batch(args)
        log_probs = log_probs_of(args, model, data, mine)
    assert max(float((expected[index] - unscaled[index]).abs().max()) for index in expected) > 1e-4
    for index, tensor in expected.items():
        torch.testing.assert_close(log_probs[index], tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_weights_come_back_byte_for_byte(name, folders):
    """Loaded and exported, every tensor has its name, dtype, shape and bytes."""
    with built(folders[name]) as (args, model, *_):
        out = exported(args, model)
    stored = folder_tensors(folders[name])
    assert list(sorted(out)) == sorted(stored)
    for name, tensor in stored.items():
        assert out[name].dtype == tensor.dtype and torch.equal(out[name], tensor), name


def test_a_family_of_the_same_block_is_one_entry(tmp_path, monkeypatch):
    """With one entry more in the table, Mistral's log-probs in trainer and engine are those of
    transformers, and its weights come back; without it both refuse it."""
    from support.engine_harness import EngineHarness
    from transformers import AutoModelForCausalLM, MistralConfig

    from slime.models import param_mapping, shape
    from slime.models.families import FAMILIES, Family

    folder = make_tiny_checkpoint(tmp_path / "model", "llama")  # its tokenizer
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    config = MistralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=104, initializer_range=0.2, sliding_window=None,
        max_position_embeddings=512,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    with pytest.raises(ConfigError, match="model_type 'mistral' is not supported"):
        shape.read_model_shape(folder)

    entry = Family("mistral", ("MistralForCausalLM",))
    for module in (shape, param_mapping):
        monkeypatch.setattr(module, "FAMILIES", {**FAMILIES, entry.model_type: entry})
    reference = reference_run(folder)
    with built(folder) as (args, model, *_):
        data, mine = local_batch(args)
        log_probs = log_probs_of(args, model, data, mine)
        out = exported(args, model)
    for index, tensor in reference["log_probs"].items():
        torch.testing.assert_close(log_probs[index], tensor, rtol=0, atol=1e-5)
    stored = folder_tensors(folder)
    assert sorted(out) == sorted(stored)
    assert all(torch.equal(out[name], tensor) for name, tensor in stored.items())

    tokens = fixed_tokens(104)[0]
    with EngineHarness(folder) as harness:
        request = harness.request(tokens, score_from=0, max_new_tokens=1)
        harness.run([request])
    prompt = LENGTHS[0][0]
    scored = torch.tensor(request.input_log_probs[prompt:])
    torch.testing.assert_close(scored, reference["log_probs"][0], rtol=0, atol=1e-4)


def test_buckets_end_with_the_parameter_that_fills_them_and_are_copies(folders):
    """A bucket ends with the parameter that fills it, and its tensors are copies that the receiver
    may keep."""
    from slime.backends.megatron_utils.update_weight import iter_hf_weight_buckets
    from slime.models.shape import read_model_shape

    shape = read_model_shape(folders["qwen3"])
    with built(folders["qwen3"]) as (args, model, *_):
        one_by_one = list(iter_hf_weight_buckets(args, model, shape, buffer_size=1))
        parameters = [parameter for chunk in model for parameter in chunk.parameters()]
        # queries, keys and values of one parameter
        assert len(one_by_one) == len(parameters) and max(map(len, one_by_one)) == 3
        assert [
            len(bucket) for bucket in iter_hf_weight_buckets(args, model, shape, buffer_size=2**40)
        ] == [sum(map(len, one_by_one))]
        args.update_weight_buffer_size = 1
        assert len(list(iter_hf_weight_buckets(args, model, shape))) == len(parameters)
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(1.0)
    stored = folder_tensors(folders["qwen3"])
    assert all(
        torch.equal(tensor, stored[name]) for bucket in one_by_one for name, tensor in bucket
    )


def test_padding_of_the_vocabulary_has_no_probability(folders):
    """With 104 tokens in a table of 1024 rows, padding rows have no probability; in the softmax
    every log-prob would be off by more than 1."""
    expected = reference_run(folders["qwen3"])
    with built(folders["qwen3"], make_vocab_size_divisible_by=1024) as (args, model, *rest):
        data, mine = local_batch(args)
        log_probs = log_probs_of(args, model, data, mine)
        metrics = train_steps(args, (model, *rest), data)
        assert model[0].module.output_layer.weight.shape[0] == 1024
    for index, tensor in expected["log_probs"].items():
        torch.testing.assert_close(log_probs[index], tensor, rtol=0, atol=1e-5)
    assert [step["train/grad_norm"] for step in metrics] == pytest.approx(
        expected["grad_norms"], rel=1e-4
    )


def test_an_empty_micro_batch_changes_nothing(folders):
    """An empty micro-batch runs the schedule and changes nothing."""
    results = []
    for empty in (False, True):
        with built(folders["llama"]) as (args, model, *rest):
            data, _ = local_batch(args)
            if empty:
                indices = data["micro_batch_indices"]
                data |= {
                    "num_microbatches": [3, 3],
                    "micro_batch_indices": [*indices[:2], [], [], *indices[2:]],
                }
            metrics = train_steps(args, (model, *rest), data)
            results.append(([step["train/loss"] for step in metrics], exported(args, model)))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-6)
    for name, tensor in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], tensor, rtol=0, atol=1e-6)


def test_a_log_prob_pass_has_no_dropout_and_leaves_the_model_training(folders):
    """A log-prob pass has no dropout, and the model is in training mode afterwards."""
    with built(folders["llama"], hidden_dropout=0.5) as (args, model, *rest):
        data, mine = local_batch(args)
        first, second = log_probs_of(args, model, data, mine), log_probs_of(args, model, data, mine)
        assert all(torch.equal(first[index], second[index]) for index in mine)
        assert all(chunk.training for chunk in model)


def test_per_token_loss_weighs_tokens_alike(folders):
    """Per token, a 17-token response counts 17 times a one-token response; per rollout they count
    the same."""
    reference = reference_run(folders["llama"])
    first_step = [reference["log_probs"][index] for index in range(4)]
    with built(folders["llama"], calculate_per_token_loss=True) as (args, *state):
        data, _ = local_batch(args)
        metrics = train_steps(args, state, data)
    assert metrics[0]["train/loss"] == pytest.approx(-float(torch.cat(first_step).mean()), rel=1e-5)


def test_a_gradient_that_is_not_finite_changes_nothing(folders):
    """A NaN in the gradient leaves weights, Adam's moments and the schedule as they are."""
    with built(folders["llama"]) as (args, model, optimizer, scheduler):
        before = exported(args, model)
        data, _ = local_batch(args)
        model[0].module.decoder.final_layernorm.register_forward_hook(
            lambda module, inputs, output: output * math.nan
        )
        metrics = train_steps(args, (model, optimizer, scheduler), data)
        after = exported(args, model)
        assert scheduler.num_steps == 0
    assert [step["train/update_skipped"] for step in metrics] == [1.0, 1.0]
    assert all(math.isnan(step["train/grad_norm"]) for step in metrics)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_weight_decay_leaves_norms_and_biases_alone(folders):
    """Weight decay shrinks matrices only, while Megatron's optimizer by itself decays norms and
    biases too."""
    with built(folders["qwen2"], clip_grad=0.0) as (args, model, optimizer, scheduler):
        before = exported(args, model)
        optimizer.step()
        after = exported(args, model)
    for name, tensor in before.items():
        if tensor.dim() == 1:
            assert torch.equal(after[name], tensor), name
        else:
            torch.testing.assert_close(after[name], tensor * (1 - 1e-2 * 0.1), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("source", ["hugging face", "checkpoint"])
def test_a_step_starts_from_the_weights_that_were_loaded(folders, tmp_path, source):
    """The fp32 copies that bfloat16 training uses hold the loaded weights, so that a first step
    without a gradient changes nothing."""
    from slime.backends.megatron_utils.checkpoint import save_checkpoint

    load_dir = None
    if source == "checkpoint":
        load_dir = str(tmp_path)
        with built(folders["qwen3"], bf16=True) as (args, *state):
            save_checkpoint(args, 0, *state, save_dir=load_dir)
    without_state = {"no_load_optim": True, "weight_decay": 0.0, "clip_grad": 0.0}
    with built(folders["qwen3"], bf16=True, load_dir=load_dir, **without_state) as (
        args,
        model,
        optimizer,
        _,
    ):
        before = exported(args, model)
        optimizer.step()
        after = exported(args, model)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_critic_gives_one_value_per_response_token(folders):
    """A critic has a new value head in place of the output layer, gives one value per response
    token, and trains."""
    from slime.backends.megatron_utils.checkpoint import load_checkpoint
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.loss import get_values
    from slime.backends.megatron_utils.model import forward_only
    from slime.backends.megatron_utils.optimizer import setup_model_and_optimizer

    with built(folders["qwen3"]) as (args, *_):
        args.num_rollout, args.eval_interval, args.debug_train_only = 0, 1, False
        assert setup_model_and_optimizer(args)[1:] == (None, None), (
            "a run that only evaluates trains nothing"
        )
        args.num_rollout = 10
        model, optimizer, scheduler = setup_model_and_optimizer(args, role="critic")
        load_checkpoint(args, model, optimizer, scheduler, load_dir=None)
        data, _ = local_batch(args)
        iterator = get_data_iterator(data)
        data |= forward_only(get_values, args, model, iterator, data["num_microbatches"])
        assert [len(values) for values in data["values"]] == [response for _, response in LENGTHS]
        data["returns"] = [torch.ones_like(values) for values in data["values"]]
        head = model[0].module.output_layer.weight.detach().clone()
        assert "lm_head.weight" not in exported(args, model), "a head of one value is no vocabulary"
        args.loss_type = "value_loss"
        metrics = train_steps(args, (model, optimizer, scheduler), data)
        assert metrics[0]["train/value_loss"] > 0
        assert not torch.equal(model[0].module.output_layer.weight, head)


def test_adaptations_leave_the_rest_of_the_process_alone(folders):
    """The adaptations to the CPU leave transformers' weights and rotary frequencies, and torch's
    refusal of CUDA, as they are, also when Megatron was imported first."""
    script = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
import megatron.core.models.gpt.gpt_model as g
from slime.accelerator import get_accelerator
from transformers import AutoModelForCausalLM
ids = torch.arange(10, 40)[None]
before = AutoModelForCausalLM.from_pretrained({str(folders["qwen3"])!r})(ids).logits
get_accelerator().prepare_megatron()
get_accelerator().prepare_megatron()
after = AutoModelForCausalLM.from_pretrained({str(folders["qwen3"])!r})(ids).logits
assert torch.equal(before, after)
assert g.torch is not torch and g.torch.zeros(1, device="cuda").device.type == "cpu"
assert str(g.torch.cuda.current_device()) == "cpu" and not torch.cuda.is_available()
assert torch.zeros(1).type() == "torch.FloatTensor" == str(torch.zeros(1).type()) and torch.zeros(1).type() == "torch.cuda.FloatTensor"
try:
    torch.zeros(1, device="cuda")
except (AssertionError, RuntimeError):
    print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip().endswith("fine"), done.stderr[-2000:]


def test_bfloat16_training_resumes_bit_for_bit(folders, tmp_path):
    """bfloat16 training resumes bit for bit, because the fp32 main weights are in the
    checkpoint."""
    from slime.backends.megatron_utils.checkpoint import save_checkpoint

    results = []
    with built(folders["qwen3"], bf16=True) as (args, *state):
        data, _ = local_batch(args)
        train_steps(args, state, data)
        save_checkpoint(args, 3, *state, save_dir=str(tmp_path))
        train_steps(args, state, data)
        results.append(exported(args, state[0]))
    with built(folders["qwen3"], bf16=True, load_dir=str(tmp_path)) as (args, *state):
        train_steps(args, state, data)
        results.append(exported(args, state[0]))
    for name, tensor in results[0].items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(results[1][name], tensor), name


def test_an_extended_run_follows_the_new_schedule_where_that_is_asked_for(folders, tmp_path):
    """With --override-opt-param-scheduler a run whose linear decay has ended continues by the
    options' schedule, here half of the way."""
    from slime.backends.megatron_utils.checkpoint import save_checkpoint

    linear = {"lr_decay_style": "linear", "lr": 1e-2, "min_lr": 0.0}
    with built(folders["llama"], **linear, lr_decay_iters=2) as (args, *state):
        data, _ = local_batch(args)
        train_steps(args, state, data)
        assert state[2].num_steps == state[2].lr_decay_steps == 2 * args.global_batch_size
        save_checkpoint(args, 0, *state, save_dir=str(tmp_path))
    rates = {}
    for override in (False, True):
        with built(
            folders["llama"],
            **linear,
            lr_decay_iters=4,
            override_opt_param_scheduler=override,
            load_dir=str(tmp_path),
        ) as (_, *state):
            rates[override] = {group["lr"] for group in state[1].param_groups}
    assert rates[False] == {0.0} and list(rates[True]) == pytest.approx([5e-3])


def test_every_stand_in_takes_what_the_installed_megatron_core_passes(folders):
    """Every stand-in accepts the arguments of the installed megatron-core, whose versions
    differ."""
    import inspect

    from slime.accelerator import get_accelerator

    get_accelerator().prepare_megatron()
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import token_dispatcher

    stand_ins = [
        rope_utils._apply_rotary_pos_emb_thd,
        random._get_cuda_rng_state,
        random._set_cuda_rng_state,
        mappings._gather_along_first_dim,
        mappings._reduce_scatter_along_first_dim,
        token_dispatcher.maybe_move_tensor_to_cpu,
    ]
    for function in stand_ins:
        own = set(inspect.signature(function).parameters) | set(getattr(function, "tolerated", ()))
        assert set(inspect.signature(function.stands_in_for).parameters) <= own, function


def test_a_stand_in_ignores_a_new_argument_only_at_its_default():
    """A stand-in ignores an unknown argument only if it has its default value."""
    from slime.accelerator.cpu_megatron import stand_in

    def original(t, freqs, mscale=1.0, *, offset=None, fused=False):
        raise AssertionError("the original must not run")

    once = stand_in(original, lambda t, freqs, mscale=1.0: (t, freqs, mscale))
    assert once(1, freqs=2, offset=None, fused=False) == (1, 2, 1.0)
    with pytest.raises(
        ConfigError,
        match=r"original was called with fused=True, which slime's CPU version of it does not know",
    ):
        once(1, 2, fused=True)
    again = stand_in(once, lambda t, freqs, mscale=1.0: "second")
    assert again(1, 2, offset=None) == "second" and again.stands_in_for is original


CALLS = []


def provide_model(pre_process, post_process, vp_stage=None):
    """--custom-model-provider-path: the model that slime would build, from options that the test
    has put down.
    """
    from slime.backends.megatron_utils.model_provider import _gpt_model, build_transformer_config

    CALLS.append(("provider", pre_process, post_process, vp_stage))
    args = provide_model.args
    places = {"vp_stage": vp_stage, "pre_process": pre_process, "post_process": post_process}
    return _gpt_model(args, build_transformer_config(args), role="actor", **places)


def before_log_prob(args, model, store_prefix):
    CALLS.append(("log_prob", len(model), store_prefix))


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    CALLS.append(("step", rollout_id, step_id, optimizer.param_groups[0]["lr"] > 0))


def test_megatron_hooks_see_every_pass_and_step_and_may_build_the_model(folders):
    """Upstream's three Megatron hooks build the model and are called before each log-prob pass and
    optimizer step."""
    from support.megatron_worker import training_args

    here = "tests.megatron.test_megatron_single_process" if __name__ == "__main__" else __name__
    paths = {
        "custom_model_provider_path": f"{here}.provide_model",
        "custom_megatron_before_log_prob_hook_path": f"{here}.before_log_prob",
        "custom_megatron_before_train_step_hook_path": f"{here}.before_train_step",
    }
    sys.modules.setdefault(here, sys.modules[__name__])
    provide_model.args = training_args(folders["qwen3"])
    CALLS.clear()
    with built(folders["qwen3"]) as (args, model, *rest):
        data, mine = local_batch(args)
        plain = log_probs_of(args, model, data, mine)
    assert CALLS == [], "without the options nothing is called"
    with built(folders["qwen3"], **paths) as (args, model, *rest):
        data, mine = local_batch(args)
        hooked = log_probs_of(args, model, data, mine)
        train_steps(args, (model, *rest), data, rollout_id=4)
    assert CALLS == [
        ("provider", True, True, None),
        ("log_prob", 1, ""),
        ("step", 4, 0, True),
        ("step", 4, 1, True),
    ]
    assert all(torch.equal(plain[position], hooked[position]) for position in plain)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
