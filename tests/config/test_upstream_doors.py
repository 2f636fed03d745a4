"""Names that users import from upstream's paths exist and behave as upstream's."""

import importlib.util
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.options import write_run_inputs  # noqa: E402
from support.pretend_rank import pretend_rank  # noqa: E402

from slime.exceptions import ConfigError  # noqa: E402

NUM_GPUS = 0


# --- Megatron's options against the Hugging Face config -------------------------------------------


def hf_options(**changes):
    return SimpleNamespace(
        **{
            "hidden_size": 64, "num_attention_heads": 4, "num_layers": 2, "ffn_hidden_size": 128, "norm_epsilon": 1e-6,
            "layernorm_epsilon": 1e-6, "rotary_base": 10000, "untie_embeddings_and_output_weights": True, "moe_ffn_hidden_size": 32,
            "moe_layer_freq": [1, 1], **changes,
        }
    )  # fmt: skip


DENSE = {
    "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {**DENSE, "intermediate_size": 999, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (DENSE, {}, []),
        (DENSE, {"hidden_size": 65, "num_layers": 3}, ["hidden_size is 65", "num_layers is 3"]),
        (DENSE, {"untie_embeddings_and_output_weights": False}, ["untie_embeddings_and_output_weights is False"]),
        (DENSE, {"norm_epsilon": 1e-5}, ["norm_epsilon is 1e-05"]),
        ({**DENSE, "rope_parameters": {"rope_theta": 5e5}}, {}, ["rotary_base is 10000 in the options and 500000.0"]),
        ({"text_config": DENSE, "hidden_size": 1}, {}, []),
        (MOE, {}, []),
        (MOE, {"moe_ffn_hidden_size": 64}, ["moe_ffn_hidden_size is 64"]),
        (MOE, {"moe_layer_freq": [0, 1]}, ["ffn_hidden_size is 128 in the options and 999"]),
        (MOE, {"moe_layer_freq": 2}, ["ffn_hidden_size is 128 in the options and 999"]),
    ],
)  # fmt: skip
def test_options_that_contradict_the_model_are_all_listed(config, changes, named):
    """All options that contradict the model are listed; a wrong width fails in loading, a wrong
    epsilon never."""
    from slime.backends.megatron_utils.arguments import _hf_validate_args

    if not named:
        return _hf_validate_args(hf_options(**changes), SimpleNamespace(**config))
    with pytest.raises(AssertionError) as caught:
        _hf_validate_args(hf_options(**changes), SimpleNamespace(**config))
    assert all(text in str(caught.value) for text in named)
    assert str(caught.value).count(" in the options and ") == len(named)


@pytest.mark.parametrize(
    ("allgather", "size", "architectures", "allowed"),
    [
        (False, 8, ["LlamaForCausalLM"], True),
        (True, 1, ["LlamaForCausalLM"], True),
        (True, 2, ["LlamaForCausalLM"], False),
        (True, 2, ["DeepseekV32ForCausalLM"], True),
        (True, 2, ["GlmMoeDsaForCausalLM"], True),
        (True, 2, None, False),
    ],
)
def test_allgather_context_parallelism_is_for_dsa_models(allgather, size, architectures, allowed):
    """Allgather context parallelism is refused for models without DSA, whose attention it would
    compute wrong."""
    from slime.backends.megatron_utils.arguments import _validate_allgather_cp_supported

    args = SimpleNamespace(allgather_cp=allgather, context_parallel_size=size)
    config = None if architectures is None else SimpleNamespace(architectures=architectures)
    if allowed:
        return _validate_allgather_cp_supported(args, config)
    with pytest.raises(ValueError, match="only supported for DSA attention models"):
        _validate_allgather_cp_supported(args, config)


def test_the_arguments_module_loads_by_its_path_with_a_stand_in_for_megatron(monkeypatch):
    """The arguments module loads by its path with a stand-in for Megatron, as tests without
    Megatron do it."""
    import slime.backends.megatron_utils as package

    path = f"{package.__path__[0]}/arguments.py"
    for name in ("megatron", "megatron.training", "megatron.training.arguments"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    spec = importlib.util.spec_from_file_location("arguments_by_path", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._hf_validate_args(hf_options(), SimpleNamespace(**DENSE))


def test_missing_options_get_their_defaults_and_given_ones_stay():
    """A namespace made by hand gets defaults for missing options and keeps given ones."""
    from slime.backends.megatron_utils.arguments import set_default_megatron_args

    args = set_default_megatron_args(SimpleNamespace(lr=None, seed=7))
    assert (args.lr, args.seed, args.clip_grad, args.micro_batch_size) == (None, 7, 1.0, 1)


# --- placement ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (48, 16)),
        ({"debug_train_only": True}, (16, 0)),
        ({"debug_rollout_only": True}, (32, 0)),
        ({"colocate": True}, (32, 0)),
        ({"colocate": True, "rollout_num_gpus": 8}, (16, 0)),
        ({"rollout_num_gpus": 0}, (16, 16)),
        ({"rollout_external": True}, (16, 16)),
        ({"rollout_external": True, "debug_rollout_only": True}, (16, 0)),
    ],
    ids=str,
)
def test_the_placement_reads_the_seven_values_that_upstream_reads(changes, expected):
    """The placement reads the seven values that upstream reads and no other."""
    from slime.ray.placement_group import _get_placement_group_layout

    sizes = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 32}
    switches = dict.fromkeys(
        ("debug_train_only", "debug_rollout_only", "colocate", "rollout_external"), False
    )
    assert (
        _get_placement_group_layout(SimpleNamespace(**{**sizes, **switches, **changes})) == expected
    )


# --- external engines -----------------------------------------------------------------------------


class Reply:
    def __init__(self, body, status=200):
        self.body, self.status_code = body, status

    def raise_for_status(self):
        if self.status_code >= 400:
            import requests

            raise requests.HTTPError(f"status {self.status_code}", response=self)

    def json(self):
        return self.body


def test_external_engines_tell_their_sizes_and_roles(monkeypatch):
    """Counts and parallel configs of external engines come from the servers' answers."""
    from slime.backends.sglang_utils import external

    told = {
        "http://h:1/server_info": {"tp_size": 4, "pp_size": 2, "dp_size": 2},
        "http://h:2/server_info": {
            "tp_size": 4,
            "dp_size": 4,
            "enable_dp_attention": True,
            "disaggregation_mode": "null",
        },
        "http://h:3/server_info": {
            "disaggregation_mode": "prefill",
            "disaggregation_bootstrap_port": 8998,
        },
    }
    monkeypatch.setattr(external.requests, "get", lambda url, timeout: Reply(told[url]))
    infos = external.discover_external_engines(["h:1", "http://h:2/", " h:3 "])
    assert [(info.url, info.worker_type, info.num_gpus) for info in infos] == [
        ("http://h:1", "regular", 16), ("http://h:2", "regular", 4), ("http://h:3", "prefill", 1),
    ]  # fmt: skip
    assert infos[0].parallel_config == {"tp_size": 4, "pp_size": 2, "dp_size": 2, "ep_size": 1}
    assert infos[2].is_pd_worker and external.external_engine_init_kwargs(infos[2]) == {
        "host": "h", "port": 3, "disaggregation_bootstrap_port": 8998,
    }  # fmt: skip
    assert external.ExternalEngineInfo(**infos[1].to_dict()) == infos[1]
    args = SimpleNamespace(rollout_external_engine_addrs=["h:1", "h:2"], sglang_api_key=None)
    external.apply_external_engine_info_to_args(args)
    assert (args.rollout_external, args.rollout_num_engines, args.rollout_num_gpus) == (True, 2, 20)
    assert not hasattr(args, "rollout_num_gpus_per_engine")
    assert external.external_engine_infos_from_args(args) == infos[:2]
    with pytest.raises(ConfigError, match=r"http://h:3 \(prefill\) do only a part"):
        args = SimpleNamespace(
            rollout_external_engine_addrs=["h:3"], sglang_api_key=None, use_sglang_router=False
        )
        external.start_external_rollout_servers(args, start_router=None)


def test_addresses_are_read_once_at_the_start_and_their_servers_waited_for_before_they_are_asked(
    monkeypatch,
):
    """Addresses are read once, their servers are waited for before they are asked, and an address
    given twice is refused first."""
    from slime.backends.sglang_utils import external

    events, normalize = [], external.normalize_external_engine_addr
    monkeypatch.setattr(
        external,
        "normalize_external_engine_addr",
        lambda addr: events.append(f"read {addr}") or normalize(addr),
    )
    monkeypatch.setattr(
        external.requests,
        "get",
        lambda url, timeout: events.append(f"ask {url}") or Reply({"tp_size": 1}),
    )
    args = SimpleNamespace(
        rollout_external_engine_addrs=["h:1", "http://h:2/"],
        sglang_api_key=None,
        use_sglang_router=False,
    )
    servers = external.start_external_rollout_servers(
        args, start_router=None, wait_for_answers=lambda urls: events.append(("wait", *urls))
    )
    assert servers.urls == ["http://h:1", "http://h:2"] and args.rollout_num_engines == 2
    assert events == [
        "read h:1",
        "read http://h:2/",
        ("wait", "http://h:1", "http://h:2"),
        "ask http://h:1/server_info",
        "ask http://h:2/server_info",
    ]
    args.rollout_external_engine_addrs = ["h:1", "http://h:1"]
    with pytest.raises(ConfigError, match="names http://h:1 more than once"):
        external.start_external_rollout_servers(
            args, start_router=None, wait_for_answers=lambda urls: pytest.fail("waited")
        )


def test_an_older_servers_route_is_tried_and_an_answer_of_another_kind_is_named(monkeypatch):
    """SGLang's older route is tried too, and an answer that is no engine's is refused."""
    from slime.backends.sglang_utils import external
    from slime.exceptions import EngineError

    replies = {
        "http://h:1/server_info": Reply({}, 404),
        "http://h:1/get_server_info": Reply({"tp_size": 2}),
    }
    monkeypatch.setattr(external.requests, "get", lambda url, timeout: replies[url])
    assert external.get_server_info("http://h:1") == {"tp_size": 2}
    replies["http://h:1/server_info"] = Reply(["no", "object"])
    with pytest.raises(
        EngineError, match="http://h:1 reports no server info .*list where an object"
    ):
        external.get_server_info("http://h:1")


@pytest.mark.parametrize(
    "addr", ["", "host", "host:", "host:port", "ftp://h:1", "http://:1", "h:99999"]
)
def test_what_is_no_address_is_refused(addr):
    """A text that is no address is refused at the start."""
    from slime.backends.sglang_utils.external import normalize_external_engine_addr

    with pytest.raises(ConfigError, match="is no address"):
        normalize_external_engine_addr(addr)


# --- the losses' doors ----------------------------------------------------------------------------


def test_returns_need_no_predicting_token():
    """A sample that is all response has as many returns as tokens, 3, with the reward discounted to
    its front."""
    from slime.utils.ppo_utils import get_reinforce_plus_plus_returns

    with pretend_rank():
        returns = get_reinforce_plus_plus_returns(
            torch.tensor([1.0, 2.0]),
            [torch.zeros(3), torch.zeros(1)],
            [torch.ones(3), torch.ones(1)],
            [3, 1],
            [3, 4],
            0.0,
            0.5,
        )
    assert [values.tolist() for values in returns] == [[0.25, 0.5, 1.0], [2.0]]


def test_a_replaced_policy_loss_acts_and_gets_the_dual_clip(monkeypatch):
    """A replaced `compute_policy_loss` in the module of `policy_loss_function` is used, with the
    dual clip."""
    from slime.algorithms.policy_loss import ClipConfig
    from slime.backends.megatron_utils import loss

    seen = []

    def replacement(ppo_kl, advantages, eps_clip, eps_clip_high, eps_clip_c=None):
        seen.append((eps_clip, eps_clip_high, eps_clip_c))
        return advantages * 10, advantages * 0

    monkeypatch.setattr(loss, "compute_policy_loss", replacement)
    values = torch.tensor([1.0, -2.0])
    result, _ = loss._token_policy_loss(
        "grpo", ClipConfig(0.1, 0.3, 3.0), values * 0, values * 0, values
    )
    assert result.tolist() == [10.0, -20.0] and seen == [(0.1, 0.3, 3.0)]


# --- conversion, dumps, traces, memory, launching -------------------------------------------------


def test_tensorizing_gives_writable_cpu_tensors_of_the_stated_types():
    """Tensors made of read-only arrays are writable CPU tensors of the stated types."""
    import numpy as np

    from slime.observability.rollout_data_utils import tensorize_rollout_data_for_training

    read_only = np.array([1, 2, 3], dtype=np.int32)
    read_only.flags.writeable = False
    data = {
        "tokens": [read_only, [4, 5]], "loss_masks": [[1, 0], [1]], "rollout_log_probs": [[-0.5, -1.0], [-2.0]],
        "rollout_mask_sums": [1, 1], "rollout_routed_experts": [np.zeros((2, 1, 1), dtype=np.uint8)], "rewards": [0.5, 1.0],
        "multimodal_train_inputs": [None, {"pixels": np.ones(2, dtype=np.float32), "note": "kept"}],
    }  # fmt: skip
    assert tensorize_rollout_data_for_training(data) is data
    assert [t.dtype for t in data["tokens"]] == [torch.int64] * 2 and data["loss_masks"][
        0
    ].dtype == torch.int32
    assert (
        data["rollout_log_probs"][1].tolist() == [-2.0]
        and data["rollout_mask_sums"].dtype == torch.float32
    )
    assert data["rollout_routed_experts"][0].dtype == torch.uint8 and data["rewards"] == [0.5, 1.0]
    assert (
        data["multimodal_train_inputs"][1]["note"] == "kept"
        and data["multimodal_train_inputs"][0] is None
    )
    data["tokens"][0][0] = 9
    assert read_only[0] == 1


def test_routed_experts_that_cannot_be_replayed_are_refused():
    """Routed experts with a layer that was not recorded are refused; it would replay expert 0 for
    every token."""
    from slime.observability.rollout_data_utils import (
        validate_rollout_routed_experts_for_replay as validate,
    )

    args = SimpleNamespace(num_layers=2, moe_router_topk=2, moe_layer_freq=[0, 1])
    good = torch.tensor([[[0, 0], [0, 1]], [[0, 0], [1, 0]]])
    validate([good], args)
    for bad, text in (([], "there are none"), ([good[:, :1]], "Invalid rollout routed-experts shape"), ([good[:0]], "no rows"),
                      ([good * 0], r"all zero in layers \[1\]")):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            validate(bad, args)


def test_context_parallel_fields_are_restored_one_tensor_at_a_time():
    """Every rank enters the collective for each field, and only the writer keeps the result."""
    from slime.observability.train_data_utils import restore_context_parallel_fields_to_cpu

    calls = []

    def gather(tensor, total_length, response_length):
        calls.append((total_length, response_length))
        return torch.cat([tensor, tensor])

    data = {
        "total_lengths": [5, 6],
        "response_lengths": [2, 4],
        "log_probs": [torch.ones(1), torch.zeros(2)],
        "rewards": [1.0, 2.0],
    }
    restored = restore_context_parallel_fields_to_cpu(data, gather, keep_restored=True)
    assert [t.tolist() for t in restored["log_probs"]] == [[1.0, 1.0], [0.0] * 4] and restored[
        "rewards"
    ] == [1.0, 2.0]
    assert calls == [(5, 2), (6, 4)] and len(data["log_probs"][0]) == 1
    assert restore_context_parallel_fields_to_cpu(data, gather, keep_restored=False) is None
    with pytest.raises(ValueError, match="one tensor per sample"):
        restore_context_parallel_fields_to_cpu(
            {**data, "log_probs": [torch.ones(1)]}, gather, keep_restored=True
        )
    with pytest.raises(TypeError, match="log_probs must hold tensors, found list"):
        restore_context_parallel_fields_to_cpu(
            {**data, "log_probs": [[1.0], [1.0]]}, gather, keep_restored=True
        )


def test_a_trace_goes_on_in_another_process():
    """A trace continues in another process: its spans lie below the span that sent the request."""
    from slime.observability.trace_utils import (
        bind_trace,
        bind_trace_carrier,
        export_trace,
        import_trace,
        trace_event,
        trace_next_attempt,
        trace_span,
    )
    from slime.utils.types import Sample

    carrier = {}
    handle = bind_trace_carrier(
        carrier, trace_id="t", sample_id=3, group_id=1, attempt=0, parent_span_id=77
    )
    assert carrier["trace"]["sample_id"] == 3 and handle.trace_id == "t"
    trace_next_attempt(handle, attrs={"why": "timeout"})
    sample = Sample()
    other = import_trace(export_trace(handle), sample)
    with trace_span(sample, "at the top of the sample"), trace_span(other, "nested") as span:
        span.set_attr("tokens", 3)
        span.update_attrs({"ok": True})
        span.set("late", 1)
    with trace_span(other, "below the sender"):
        trace_event([sample, other], "once")
    assert bind_trace(sample).trace is sample.trace and sample.trace["attempt"] == 1
    by_name = {
        event["name"]: event for event in sample.trace["events"] if event["type"] != "span_start"
    }
    assert by_name["below the sender"]["parent_id"] == 77
    assert by_name["nested"]["parent_id"] == by_name["at the top of the sample"]["span_id"]
    assert by_name["nested"]["attrs"] == {"tokens": 3, "ok": True, "late": 1}
    assert [event["name"] for event in sample.trace["events"]].count("once") == 1
    assert len(carrier["trace"]["events"]) == 1, "the exported trace is a copy"
    assert import_trace({"events": 3}) is None


def test_an_error_is_noted_unless_it_is_not_wanted():
    """`record_error=False` keeps an error that is part of a normal run, such as a cancelled
    request, out of the span."""
    from slime.observability.trace_utils import trace_span
    from slime.utils.types import Sample

    sample = Sample()
    with pytest.raises(KeyError), trace_span(sample, "quiet", record_error=False):
        raise KeyError("x")
    assert sample.trace["events"][-1]["attrs"] == {}


def test_series_of_ones_own_reach_tensorboard(tmp_path):
    """A user's own scalars are written to TensorBoard, and texts are left out."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from slime.observability.tensorboard_utils import _TensorboardAdapter

    adapter = _TensorboardAdapter(
        SimpleNamespace(run_dir=str(tmp_path), tb_project_name="p", tb_experiment_name=None)
    )
    adapter.log({"own/x": 1.5, "text": "left out"}, 4)
    adapter.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "p")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("own/x")] == [(4, 1.5)]


def test_memory_is_told_in_gigabytes():
    """Memory is reported in gigabytes as allocated, peak, free and total, of the machine where
    there is no device."""
    from slime.utils.memory_utils import available_memory, clear_memory, print_memory

    clear_memory(clear_host_memory=True)
    memory = print_memory("now")
    assert set(memory) == set(available_memory()) == {"allocated", "peak", "free", "total"}
    assert 0 < memory["allocated"] <= memory["total"]


def test_a_launch_script_runs_the_command_line_and_hears_of_failure(capfd):
    """A launch script runs the command line with the same parser and gets its exit status."""
    from slime.utils.external_utils.command_utils import execute_train

    execute_train("--help rollout-top-k", extra_env_vars={"SLIME_ACCELERATOR": "cpu"})
    assert "--rollout-top-k" in capfd.readouterr().out
    with pytest.raises(subprocess.CalledProcessError) as caught:
        execute_train(["--no-such-flag"], num_gpus_per_node=1)
    assert caught.value.returncode == 2
    with pytest.raises(ConfigError, match="train_script 'x.py'"):
        execute_train("", train_script="x.py")


def test_a_launch_script_may_say_how_many_devices_the_run_sees(monkeypatch):
    """Upstream's num_gpus_per_node is what its cluster offers; the flag of that name is refused.
    The caller's own choice of devices wins.
    """
    from slime.utils.external_utils import command_utils

    calls = []
    monkeypatch.setattr(
        command_utils.subprocess,
        "run",
        lambda command, **kwargs: calls.append((command, kwargs["env"])),
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    command_utils.execute_train("--lr 1", num_gpus_per_node=2)
    command_utils.execute_train(
        "--lr 1", num_gpus_per_node=2, extra_env_vars={"CUDA_VISIBLE_DEVICES": "5"}
    )
    command_utils.execute_train("--lr 1")
    assert [command[2:] for command, _ in calls] == [["slime.train", "--lr", "1"]] * 3
    assert [environment.get("CUDA_VISIBLE_DEVICES") for _, environment in calls] == [
        "0,1",
        "5",
        None,
    ]


def test_moments_are_reset_and_weights_are_not():
    """A reset clears the moments and keeps the weights: the second step equals a new optimizer's
    first."""
    from slime.backends.megatron_utils.optimizer_state import reset_optimizer_states

    def step(parameter, optimizer, gradient):
        parameter.grad = torch.tensor([gradient])
        optimizer.step()

    used, fresh = (torch.nn.Parameter(torch.tensor([1.0])) for _ in range(2))
    optimizer = torch.optim.Adam([used], lr=0.1)
    step(used, optimizer, 3.0)
    with torch.no_grad():
        fresh.copy_(used)
    reset_optimizer_states(SimpleNamespace(optimizer=optimizer, is_stub_optimizer=False))
    assert used.item() == fresh.item() != 1.0
    step(used, optimizer, -0.5)
    step(fresh, torch.optim.Adam([fresh], lr=0.1), -0.5)
    assert used.item() == fresh.item()


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--update-weight-transport nccl", "--update-weight-transport nccl: .*Use tensor."),
        (
            "--update-weight-transport nccl --rollout-external-engine-addrs h:1",
            "Use disk --update-weight-disk-dir FOLDER",
        ),
        ('--train-env-vars {"A":1}', "--train-env-vars: values must be texts, got {'A': 1}"),
        (
            "--megatron-config-path roles.yaml",
            "role critic: unknown option 'lrr'. Did you mean 'lr'",
        ),
    ],
)
def test_upstream_options_that_cannot_work_say_what_to_use(words, told, tmp_path, monkeypatch):
    """Upstream options that cannot work are refused before the start with what to use."""
    from slime.utils.arguments import parse_args

    monkeypatch.chdir(tmp_path)
    Path("roles.yaml").write_text("megatron:\n- {role: critic, overrides: {lrr: 1.0e-5}}\n")
    with pytest.raises(ConfigError, match=told):
        parse_args([*write_run_inputs(tmp_path), *words.split()])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
