"""Patches of upstream's names, and for each a real call that must run into the replaced name.

A `Patch` is a row of a table; `given`, `loss_call`, `manager_call` and the others prepare the call
of its entry.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from support.gate_samples import sound_sample
from support.loss_cases import make_logits, make_samples, mask_sums_of, pack
from support.manager import manager_of
from support.pretend_rank import pretend_rank
from support.reference import ReferenceOptions
from support.rollout_args import rollout_args, write_prompts

from slime.utils.types import Sample

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from interface_check import resolve  # noqa: E402

# Given the entry and a place (with tmp_path and monkeypatch), what is then called while the name is
# replaced.
Prepare = Callable[[Any, Any], Callable[[], Any]]


class Reached(BaseException):
    """Raised in place of the patched name. Not an Exception: code that survives failures must not
    hide it.
    """


@dataclasses.dataclass(frozen=True)
class Patch:
    """`patched`: path of the name that is replaced. `entry`: path of what users call. `call`
    prepares that call.
    """

    patched: str
    entry: str
    call: Prepare


def given(*args: Any, **kwargs: Any) -> Prepare:
    """The call with these arguments."""
    return lambda entry, place: lambda: entry(*args, **kwargs)


def on_rank(call: Prepare, **layout: Any) -> Prepare:
    """The call on a rank of a layout that Megatron only pretends."""

    def prepare(entry: Any, place: Any) -> Callable[[], Any]:
        prepared = call(entry, place)

        def run() -> Any:
            with pretend_rank(**layout):
                return prepared()

        return run

    return prepare


def loss_call(*, reducer: bool = False, role: str | None = None, **options: Any) -> Prepare:
    """A loss of one packed micro-batch of two samples; `reducer`: the entry takes a reducer, as the
    losses of one type do.
    """

    def prepare(entry: Any, place: Any) -> Callable[[], Any]:
        samples = make_samples([(2, 4), (1, 3)], 3)
        logits = make_logits(samples, 4, width=1 if role == "critic" else 13)
        with pretend_rank():
            batch, packed = pack(samples, logits, [[1.0] * 4, [-1.0] * 3], mask_sums_of(samples))
        args = SimpleNamespace(**{**dataclasses.asdict(ReferenceOptions()), **options})
        if reducer:
            return lambda: entry(args, batch, packed, torch.sum)
        return lambda: entry(args, batch, 1, 2, packed, **({"role": role} if role else {}))

    return on_rank(prepare)


def advantages_call(**options: Any) -> Prepare:
    """Advantages of one sample with two response tokens."""
    values = {"advantage_estimator": "grpo", "kl_coef": 0.0, "kl_loss_type": "k1", "use_rollout_logprobs": False, "use_opd": False,
              "custom_advantage_function_path": None, "normalize_advantages": False, "gamma": 1.0, "lambd": 1.0, "use_kl_loss": False}  # fmt: skip

    def prepare(entry: Any, place: Any) -> Callable[[], Any]:
        tokens = {name: [torch.zeros(2)] for name in ("log_probs", "values", "teacher_log_probs")}
        data = {
            "total_lengths": [4],
            "response_lengths": [2],
            "loss_masks": [torch.ones(2)],
            "rewards": [1.0],
            **tokens,
        }
        return lambda: entry(SimpleNamespace(**{**values, **options}), data)

    return on_rank(prepare)


class Chunk:
    """A model of one parameter's gradient."""

    def __init__(self) -> None:
        self.buffers, self.expert_parallel_buffers = [SimpleNamespace(grad_data=torch.zeros(1))], []
        self.zero_grad_buffer = self.train = self.eval = lambda: None

    def __call__(self, **batch: Any) -> torch.Tensor:
        return torch.zeros(1)


OPTIMIZER = SimpleNamespace(zero_grad=lambda: None, step=lambda: (True, 1.0, None), param_groups=[])
SCHEDULER = SimpleNamespace(step=lambda increment: None)


def step_call(**replaced: Any) -> Prepare:
    """One optimizer step whose schedule makes one forward pass; `replaced`: further names of
    model.py.
    """

    def schedule(*, forward_step_func: Any, model: Any, forward_only: bool, **_: Any) -> list:
        output, finish = forward_step_func(None, model[0])
        finish(output)
        return []

    def prepare(entry: Any, place: Any) -> Callable[[], Any]:
        from slime.backends.megatron_utils import model

        batch = collections.defaultdict(lambda: None)
        names = {"get_batch": lambda *a, **k: batch, "loss_function": lambda *a, **k: None,
                 "get_forward_backward_func": lambda: schedule, "_gradients_are_finite": lambda model: True, **replaced}  # fmt: skip
        for name, value in names.items():
            if value is not None:
                place.monkeypatch.setattr(model, name, value)
        args = rollout_args(seq_length=8)
        sizes = {"num_microbatches": 1, "step_global_batch_size": 1}
        return lambda: entry(args, [None], [Chunk()], OPTIMIZER, SCHEDULER, **sizes)

    return on_rank(prepare)


def train_call(**replaced: Any) -> Prepare:
    """All steps of a rollout that has one."""

    def prepare(entry: Any, place: Any) -> Callable[[], Any]:
        from slime.backends.megatron_utils import model

        for name, value in {"is_megatron_main_rank": lambda: True, **replaced}.items():
            place.monkeypatch.setattr(model, name, value)
        iterator = SimpleNamespace(
            rollout_data={"num_microbatches": [1], "global_batch_sizes": [1]}, reset=lambda: None
        )
        return lambda: entry(
            rollout_args(global_batch_size=8), 0, [Chunk()], OPTIMIZER, SCHEDULER, [iterator]
        )

    return on_rank(prepare)


def manager_call(method: str, **options: Any) -> Prepare:
    """A method of a manager whose rollout function returns sixteen sound samples."""

    def prepare(entry: Any, place: Any) -> Callable[[], Any]:
        samples = [
            [sound_sample(4 * g + i, length=6, reward=float(i), group_index=g) for i in range(4)]
            for g in range(4)
        ]
        flat = [sample for group in samples for sample in group]
        manager = manager_of(flat, place.tmp_path, place.monkeypatch, **options)
        assert type(manager) is entry
        manager.generate_rollout = lambda args, rollout_id, source, evaluation: samples
        return lambda: getattr(manager, method)(0)

    return prepare


def start_call(entry: Any, place: Any) -> Callable[[], Any]:
    """The manager's own start, up to its engines."""
    module = sys.modules[entry.__module__]
    args = rollout_args(run_dir=None, hf_checkpoint=None, rollout_global_dataset=False)
    for name in ("configure_logger", "init_tracking"):
        place.monkeypatch.setattr(module, name, lambda *a, **k: None)
    place.monkeypatch.setattr(module, "Lock", SimpleNamespace(remote=lambda: None))
    return lambda: entry(args, ())


@contextlib.contextmanager
def _no_rank() -> Any:
    yield None


class State:
    """What GenerateState has for one sample."""

    def __init__(self, args: Any = None) -> None:
        self.semaphore = self.group_semaphore = asyncio.Semaphore(1)
        self.aborted, self.gate, self.dp_rank_context, self.sampling_params = (
            False,
            None,
            _no_rank,
            {},
        )


def generation_call(*, group: bool = False, state: bool = True, **options: Any) -> Prepare:
    """A generation of one sample (or a group of one) by the default rollout function's parts."""

    def prepare(entry: Any, place: Any) -> Callable[[], Any]:
        from slime.rollout import sglang_rollout

        if state:
            place.monkeypatch.setattr(sglang_rollout, "GenerateState", State)
        args = rollout_args(rollout_group_requests="off", **options)
        sample = Sample(prompt="1+1=", index=0, group_index=0)
        return lambda: entry(args, [sample] if group else sample, {"max_new_tokens": 4})

    return prepare


def dataset_call(**options: Any) -> Prepare:
    """A data source or dataset over a file of two prompts."""

    def prepare(entry: Any, place: Any) -> Callable[[], Any]:
        path = write_prompts(place.tmp_path / "p.jsonl", 2)
        return lambda: entry(rollout_args(prompt_data=path, **options))

    return prepare


def read_dataset(entry: Any, place: Any) -> Callable[[], Any]:
    path = write_prompts(place.tmp_path / "p.jsonl", 2)
    return lambda: entry(
        path, lambda texts, **_: {"input_ids": [[1]] * len(texts)}, None, 8, prompt_key="input"
    )


def read_prompts(entry: Any, place: Any) -> Callable[[], Any]:
    path = write_prompts(place.tmp_path / "p.jsonl", 2)
    return lambda: list(entry(path))


def tokenizer_call(entry: Any, place: Any) -> Callable[[], Any]:
    # a folder that no other test has: tokenizers are remembered by folder
    return lambda: entry(str(place.tmp_path))


def state_call(**options: Any) -> Prepare:
    """A new GenerateState, beside the process's own."""

    def prepare(entry: Any, place: Any) -> Callable[[], Any]:
        if "multimodal_keys" in options:  # the processor comes after the tokenizer
            place.monkeypatch.setattr(
                "slime.utils.processing_utils.shared_tokenizer", lambda path: None
            )
        args = rollout_args(hf_checkpoint=str(place.tmp_path), **options)
        return lambda: entry.__init__(object.__new__(entry), args)

    return prepare


def media_call(entry: Any, place: Any) -> Callable[[], Any]:
    """The request of a prompt with an image."""
    state = SimpleNamespace(
        tokenizer=None, processor=lambda **_: {"input_ids": torch.tensor([[1]])}
    )
    sample = Sample(prompt="look", index=0, multimodal_inputs={"images": [object()]})
    return lambda: entry(rollout_args(), state, sample, {"max_new_tokens": 4})


def supervised_call(entry: Any, place: Any) -> Callable[[], Any]:
    place.monkeypatch.setattr("slime.utils.processing_utils.shared_tokenizer", lambda path: None)
    return lambda: entry(
        rollout_args(hf_checkpoint=str(place.tmp_path)),
        0,
        SimpleNamespace(get_samples=lambda count: []),
    )


def worker_call(entry: Any, place: Any) -> Callable[[], Any]:
    """A worker that tops up its groups once."""
    from slime.rollout import fully_async_rollout

    place.monkeypatch.setattr(fully_async_rollout, "GenerateState", State)
    source = SimpleNamespace(get_samples=lambda count: [[Sample(index=0, group_index=0)]])

    async def top_up() -> None:
        entry(rollout_args(), source, concurrency=1)._top_up(set())

    return top_up


MODEL_SIZES = SimpleNamespace(num_layers=2, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, num_query_groups=2, kv_channels=4,
                              vocab_size=16, num_experts=None)  # fmt: skip


def schedule_call(**options: Any) -> Prepare:
    """A schedule of four samples for two ranks."""
    values = {
        "micro_batch_size": 2,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 8,
        "balance_data": False,
        "balance_by_flops": False,
    }
    layout = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    args = SimpleNamespace(**{**vars(MODEL_SIZES), **values, **options})
    return given(args, layout, [3, 4, 5, 3], global_batch_size=4, rollout_indices=[0, 1, 2, 3])


def dump_train_data(entry: Any, place: Any) -> Callable[[], Any]:
    for name in ("data_parallel_group_gloo", "data_parallel_src_rank", "data_parallel_rank"):
        place.monkeypatch.setattr(f"megatron.core.mpu.get_{name}", lambda **_: 0)
    args = rollout_args(save_debug_train_data="{rollout_id}")
    return on_rank(given(args, rollout_id=0, rollout_data={}))(entry, place)


def is_reached(row: Patch, place: Any) -> bool:
    """Whether the entry, which is imported before the patch as a user's code is, runs into the
    replaced name.
    """
    reached = []

    def stand_in(*args: Any, **kwargs: Any) -> None:
        reached.append(row.patched)
        raise Reached(row.patched)

    async def finish(awaitable: Any) -> None:
        await awaitable

    call = row.call(resolve(row.entry), place)
    with mock.patch(row.patched, stand_in), contextlib.suppress(Reached):
        result = call()
        if inspect.isawaitable(result):
            asyncio.run(finish(result))
    return bool(reached)
