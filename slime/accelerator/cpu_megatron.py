"""Every adaptation that makes megatron-core (0.16 to 0.19) run on the CPU over gloo. Installed only
where CUDA is not used.

Principle: megatron-core's modules, and only they, see a `torch` module whose device "cuda" is the
CPU. The process's real torch stays as it is, so Hugging Face models, user code and the engine are
unaffected. (Wrapping the real torch's factory functions instead silently corrupts
`from_pretrained`: rotary frequencies stay uninitialised.)

Adaptations, each with the reason it exists:

 1. `torch.<factory>(device="cuda", pin_memory=True)` in megatron modules makes CPU tensors: token
    counters of the schedules,
    gradient clipping, embeddings' index tensors and checkpoint code name the device literally.
 2. `torch.cuda.current_device()` in megatron modules is `torch.device("cpu")`: most allocations use
    it as the device.
 3. `torch.cuda.{manual_seed,get_rng_state,set_rng_state}` in megatron modules act on the CPU's
    default generator, and
    `tensor_parallel.random._get/_set_cuda_rng_state` too: model-parallel seeds and dropout streams
    keep their meaning.
 4. `torch.cuda.{Stream,Event,stream,current_stream,synchronize,empty_cache}` in megatron modules do
    nothing: the MoE
    dispatcher and the checkpoint writer order work with them; CPU work is already in order.
 5. `torch.Tensor.type()` returns a name that equals both "torch.FloatTensor" and
    "torch.cuda.FloatTensor": the optimizers and
    gradient clipping sort parameters by the latter. Process-wide, because it is a method of every
    tensor.
 6. `torch.Tensor.cuda()` returns the tensor itself. Process-wide, same reason.
 7. Functions that megatron wraps in `torch.compile` stay, or become again, what they were:
    compiling costs minutes and gains
    nothing here. While megatron is imported by this module, `torch.compile` is the identity and
    wandb (which megatron's
    inference code looks for) is not found: importing the compiler and wandb would double the start
    of every rank.
 8. `moe_utils.te_general_gemm = None`: unbound without Transformer Engine, NameError in the router.
 9. `token_dispatcher.maybe_move_tensor_to_cpu` gives numpy splits also for CPU tensors: gloo's
    all_to_all takes no tensors.
10. `rope_utils._apply_rotary_pos_emb_thd` gathers the angles of a packed row with one index instead
    of slicing per sequence:
    same numbers, but a row of 64 short sequences costs one operation instead of 64 in every layer.
11. `mappings._gather/_reduce_scatter_along_first_dim` with parts of unequal size (experts cut over
    tensor-parallel ranks) pad
    to the largest part, or sum everything and keep a part: gloo's all_gather and reduce_scatter
    want equal sizes.

Functions of 7 to 11 are replaced through `stand_in`, so that an argument that a newer megatron-core
adds does not break the call.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from slime.data.packed_plan import packed_plan
from slime.exceptions import ConfigError

_FACTORIES = (
    "tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "eye", "linspace",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
)  # fmt: skip

# Imported before patching, so that none of them meets the real torch later.
_MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel.random",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.dist_checkpointing.serialization",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.exchange_utils",
)

_patched_modules: set[str] = set()


def install_cpu_adaptations() -> None:
    """Installs all adaptations of this module's docstring. Idempotent; works before and after
    megatron's own import, and a second call also covers megatron modules that were imported in
    between.
    """
    with _light_imports():
        for name in _MODULES:
            importlib.import_module(name)
    proxy = _torch_for_megatron()
    for name, module in list(sys.modules.items()):
        if (
            name.startswith("megatron.core.")
            and name not in _patched_modules
            and module is not None
        ):
            if module.__dict__.get("torch") is torch:
                module.__dict__["torch"] = proxy
            _unwrap_compiled(module)
            _patched_modules.add(name)
    _patch_rng()
    _patch_moe()
    _patch_rope()
    _patch_uneven_collectives()
    if not isinstance(torch.Tensor.type, _TypeMethod):
        # type: ignores: to replace methods is what an adaptation does
        torch.Tensor.type = _TypeMethod(torch.Tensor.type)  # type: ignore[method-assign,assignment]
        torch.Tensor.cuda = _same_tensor  # type: ignore[method-assign,assignment]


@contextlib.contextmanager
def _light_imports() -> Iterator[None]:
    compiler, knows_wandb = torch.compile, "wandb" in sys.modules

    def leave_as_is(function: object = None, **options: object) -> Any:
        return function if function is not None else lambda decorated: decorated

    torch.compile = leave_as_is  # type: ignore[assignment]  # until megatron is imported
    if not knows_wandb:
        sys.modules["wandb"] = None  # type: ignore[assignment]  # makes `import wandb` an ImportError
    try:
        yield
    finally:
        torch.compile = compiler
        if not knows_wandb:
            del sys.modules["wandb"]


@functools.cache
def _torch_for_megatron() -> types.ModuleType:
    """A copy of torch's namespace with adaptations 1 to 4. A copy, not `__getattr__`, so that a
    look-up costs nothing.
    """
    proxy = types.ModuleType("torch")
    proxy.__dict__.update(torch.__dict__)
    # Names that torch loads on first use.
    proxy.__getattr__ = lambda name: getattr(torch, name)  # type: ignore[method-assign]  # PEP 562
    for name in _FACTORIES:
        proxy.__dict__[name] = _on_cpu(getattr(torch, name))
    cuda = types.ModuleType("torch.cuda")
    cuda.__dict__.update(torch.cuda.__dict__)
    cuda.__getattr__ = lambda name: getattr(torch.cuda, name)  # type: ignore[method-assign]  # as above
    cuda.__dict__.update(
        current_device=lambda: torch.device("cpu"),
        manual_seed=torch.default_generator.manual_seed,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        Stream=_NoStream,
        Event=_NoStream,
        current_stream=lambda device=None: _NO_STREAM,
        default_stream=lambda device=None: _NO_STREAM,
        stream=lambda stream: contextlib.nullcontext(),
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
    )
    proxy.__dict__["cuda"] = cuda
    return proxy


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if (
            device is not None
            and not isinstance(device, int)
            and torch.device(device).type == "cuda"
        ):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


class _NoStream:
    """A CUDA stream or event where all work is already in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def record_event(self, event: object = None) -> _NoStream:
        return self

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


_NO_STREAM = _NoStream()


class _TypeName(str):
    """ "torch.FloatTensor" that also equals "torch.cuda.FloatTensor"."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or (
            isinstance(other, str) and other == "torch.cuda" + self[len("torch") :]
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class _TypeMethod:
    """`Tensor.type` as a descriptor, so that a second installation can see the first."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __get__(self, tensor: torch.Tensor | None, owner: type | None = None) -> Any:
        if tensor is None:
            return self
        return functools.partial(self._type, tensor)

    def _type(
        self,
        tensor: torch.Tensor,
        dtype: torch.dtype | str | None = None,
        non_blocking: bool = False,
        **kwargs: Any,
    ) -> Any:
        if dtype is None:
            return _TypeName(self.original(tensor))
        return self.original(tensor, dtype, non_blocking, **kwargs)


def _same_tensor(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return tensor


def stand_in(original: Callable, replacement: Callable) -> Callable:
    """Returns `replacement`, made to accept the arguments that only `original` has, as long as they
    have `original`'s defaults.

    megatron-core adds arguments from version to version. One that the replacement does not know
    must not be ignored when it asks for something: then the call raises ConfigError.
    """
    # what a second installation replaces is the first's replacement
    original = getattr(original, "stands_in_for", original)
    known = inspect.signature(replacement).parameters
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(original).parameters.items()
        if name not in known
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    replacement.stands_in_for = original  # type: ignore[attr-defined]  # a mark on the function
    if not defaults:
        return replacement

    @functools.wraps(replacement)
    def call(*args: object, **kwargs: object) -> Any:
        for name, default in defaults.items():
            value = kwargs.pop(name, default)
            if value is not default and value != default:
                raise ConfigError(
                    f"{original.__module__}.{original.__name__} was called with {name}={value!r}, "
                    "which slime's CPU version of it does "
                    "not know. Use megatron-core 0.16 to 0.19."
                )
        return replacement(*args, **kwargs)

    call.tolerated = tuple(defaults)  # type: ignore[attr-defined]  # a mark on the function
    return call


def _unwrap_compiled(module: types.ModuleType) -> None:
    owners = [module] + [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    for owner in owners:
        for name, value in list(vars(owner).items()):
            original = getattr(value, "_torchdynamo_orig_callable", None)
            if original is not None:
                setattr(owner, name, original)


def _patch_rng() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(
        device: object = None, clone: bool = False, graph_safe: bool = False
    ) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    megatron_random._get_cuda_rng_state = stand_in(megatron_random._get_cuda_rng_state, get_state)
    megatron_random._set_cuda_rng_state = stand_in(megatron_random._set_cuda_rng_state, set_state)


def _patch_moe() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    def to_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and isinstance(tensor, torch.Tensor):
            return tensor.numpy()
        return tensor

    token_dispatcher.maybe_move_tensor_to_cpu = stand_in(
        token_dispatcher.maybe_move_tensor_to_cpu, to_host
    )


def _patch_uneven_collectives() -> None:
    from megatron.core.tensor_parallel import mappings

    if getattr(mappings._gather_along_first_dim, "takes_uneven_parts", False):
        return
    even_gather, even_reduce_scatter = (
        mappings._gather_along_first_dim,
        mappings._reduce_scatter_along_first_dim,
    )

    def gather(
        input_: torch.Tensor,
        group: torch.distributed.ProcessGroup,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatter(
        input_: torch.Tensor,
        group: torch.distributed.ProcessGroup,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even_reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].clone()

    mappings._gather_along_first_dim = stand_in(even_gather, gather)
    mappings._gather_along_first_dim.takes_uneven_parts = True
    mappings._reduce_scatter_along_first_dim = stand_in(even_reduce_scatter, reduce_scatter)


def _patch_rope() -> None:
    from megatron.core.models.common.embeddings import rope_utils

    def apply_rotary_pos_emb_thd(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        rotary_interleaved: bool = False,
        mla_rotary_interleaved: bool = False,
        mscale: float = 1.0,
        cp_group: Any = None,
        multi_latent_attention: bool | None = None,  # the same, by its name in megatron-core 0.16
    ) -> torch.Tensor:
        plan = packed_plan(cu_seqlens, cp_size=cp_group.size(), cp_rank=cp_group.rank())
        if mla_rotary_interleaved or multi_latent_attention:
            x1, x2 = t[..., 0::2], t[..., 1::2]
            t = torch.cat((x1, x2), dim=-1)
        cos, sin = plan.rotary_tables(freqs, mscale, t.dtype)
        rotated, passed = t[..., : cos.shape[-1]], t[..., cos.shape[-1] :]
        half = rope_utils._rotate_half(rotated.unsqueeze(1), rotary_interleaved).squeeze(1)
        rotated = rotated * cos + half * sin
        return torch.cat((rotated, passed), dim=-1) if passed.shape[-1] else rotated

    rope_utils._apply_rotary_pos_emb_thd = stand_in(
        rope_utils._apply_rotary_pos_emb_thd, apply_rotary_pos_emb_thd
    )
