"""Small helpers that every stage may use. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import base64
import functools
import importlib
import ipaddress
import logging
import pkgutil
import socket
import subprocess
import traceback
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.config.specs import nearest_names
from slime.exceptions import ConfigError

logger = logging.getLogger(__name__)


@functools.cache
def load_function(path: str) -> Any:
    """The object at a dotted path "package.module.name". ConfigError, with the nearest name, where
    the module or the name is missing, and with the place where the import of the module failed.
    """
    module_path, _, name = path.rpartition(".")
    if not module_path or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(
            f"cannot load {path!r}: it is not a dotted path. Write it as package.module.function."
        )
    try:
        module = importlib.import_module(module_path)
    except SystemExit as error:
        raise ConfigError(
            f"cannot load {path!r}: {module_path} ends the process when it is imported."
        ) from error
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (
            module_path == missing or module_path.startswith(missing + ".")
        ):
            raise ConfigError(
                f"cannot load {path!r}: there is no module {missing!r}.{_module_hint(missing)}"
            ) from error
        raise ConfigError(
            f"cannot load {path!r}: importing {module_path} fails: {_where_it_failed(error)}"
        ) from error
    if not hasattr(module, name):
        raise ConfigError(
            f"cannot load {path!r}: module {module_path!r} has no "
            f"{name!r}.{_name_hint(module, name)}"
        )
    return getattr(module, name)


def _module_hint(missing: str) -> str:
    """What may have been meant by a module that does not exist."""
    parent, _, last = missing.rpartition(".")
    folders = getattr(importlib.import_module(parent), "__path__", []) if parent else None
    near = nearest_names(last, sorted(module.name for module in pkgutil.iter_modules(folders)))
    if near:
        return f" Did you mean {'.'.join(filter(None, [parent, near[0]]))!r}?"
    if parent:
        return ""
    here = Path(last).is_dir() or Path(f"{last}.py").is_file()
    return (
        f" It is in this folder: set PYTHONPATH={Path.cwd()}"
        if here
        else " Is its folder on PYTHONPATH?"
    )


def _name_hint(module: types.ModuleType, name: str) -> str:
    own = [
        key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
    ]
    near = nearest_names(name, own)
    if near:
        return f" Did you mean {module.__name__}.{near[0]}?"
    own = [
        key for key in own if getattr(getattr(module, key), "__module__", None) == module.__name__
    ]
    return f" It has {', '.join(own[:8])}." if own else ""


def _where_it_failed(error: BaseException) -> str:
    """The error with the file and line of the last frame (of a syntax error: where it stands)."""
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    return (
        text
        if isinstance(error, SyntaxError) or not frames
        else f"{text} ({frames[-1].filename}:{frames[-1].lineno})"
    )


class SingletonMeta(type):
    """Metaclass of a class with one instance per process; the first call's arguments build it."""

    _instances: dict[type, Any] = {}

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]

    @staticmethod
    def exchange(cls: type, instance: object) -> Any:
        """Makes `instance` the one of `cls`, None for one that is still to be built, and returns
        the one before.
        """
        before = SingletonMeta._instances.pop(cls, None)
        if instance is not None:
            SingletonMeta._instances[cls] = instance
        return before

    @staticmethod
    def clear_instances(cls: type | None = None) -> None:
        """Forgets every instance, so that the next call builds a new one."""
        SingletonMeta._instances.clear()


class Box:
    """Holds one object (an object reference) so that Ray does not resolve it in an argument list.
    `num_trained`: samples in it that train.
    """

    def __init__(self, inner: object, num_trained: int = 0) -> None:
        self._inner = inner
        self.num_trained = num_trained

    @property
    def inner(self) -> Any:
        return self._inner


def group_by(
    iterable: Iterable[Any], key: Callable[[Any], Hashable] | None = None
) -> dict[Hashable, list]:
    """The items by key (the item itself without one), keys in order of first sight."""
    groups: dict[Hashable, list] = {}
    for item in iterable:
        groups.setdefault(item if key is None else key(item), []).append(item)
    return groups


def decode_int32_meta_array(meta: dict, keys: str | Sequence[str]) -> Any:
    """The flat int32 tensor under the first of `keys` that `meta` has, None if it has none of them.

    Accepts base64 text or bytes of little-endian int32, numpy arrays, tensors and (nested) lists.
    """
    for key in [keys] if isinstance(keys, str) else keys:
        if meta.get(key) is not None:
            return _as_int32(meta[key])
    return None


def _as_int32(value: object) -> Any:
    import numpy as np
    import torch

    if isinstance(value, str):
        value = base64.b64decode(value, validate=True)
    if isinstance(value, bytes | bytearray | memoryview):
        if len(value) % 4:
            raise ValueError(
                f"an int32 payload of {len(value)} bytes is not a whole number of values"
            )
        return torch.from_numpy(np.frombuffer(bytes(value), dtype="<i4").astype(np.int32))
    return torch.as_tensor(value).to(torch.int32).reshape(-1)


def should_run_periodic_action(
    rollout_id: int,
    interval: int | None,
    num_rollout_per_epoch: int | None = None,
    num_rollout: int | None = None,
) -> bool:
    """True after every `interval` rollouts, at an epoch's end (where epochs are counted) and after
    the last rollout; never without interval.
    """
    if interval is None:
        return False
    done = rollout_id + 1
    if num_rollout is not None and done == num_rollout:
        return True
    return done % interval == 0 or bool(num_rollout_per_epoch and done % num_rollout_per_epoch == 0)


def count_rollouts_per_epoch(
    num_prompts: int, rollout_batch_size: int, *, num_epoch: int | None
) -> int:
    """Whole batches in one pass over the prompts; 0 where the prompts do not fill one and
    `num_epoch` does not ask for it.

    ConfigError where it does: --num-epoch counts whole batches, and there would be nothing to run.
    """
    per_epoch = num_prompts // rollout_batch_size
    if not per_epoch and num_epoch is not None:
        raise ConfigError(
            f"--num-epoch {num_epoch} runs nothing: the {num_prompts} prompts do not fill one "
            "batch of --rollout-batch-size "
            f"{rollout_batch_size}. Use --rollout-batch-size {num_prompts} or less, or --num-rollout, which goes over the prompts as often as needed."
        )
    return per_epoch


def exec_command(command: str, capture_output: bool = False) -> str | None:
    """Runs a shell command and returns its output when captured. CalledProcessError on a non-zero
    status.
    """
    logger.info("running: %s", command)
    done = subprocess.run(
        ["bash", "-c", command], check=True, capture_output=capture_output, text=True
    )
    return done.stdout if capture_output else None


def get_current_node_ip() -> str:
    """This node's address as Ray knows it; without Ray, that of this machine for itself."""
    import ray

    if not ray.is_initialized():
        return "127.0.0.1"
    return ray.util.get_node_ip_address().strip("[]")


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """The first port from `start_port` on that starts a run of `consecutive` free ones. OSError if
    there is none.
    """
    for port in range(start_port, 65536 - consecutive):
        if all(is_port_free(port + offset) for offset in range(consecutive)):
            return port
    raise OSError(f"no {consecutive} consecutive free port(s) from {start_port} on")


def is_loopback(host: str) -> bool:
    """True if `host` is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_port_free(port: int, host: str = "") -> bool:
    """Whether a socket can be bound to `port` (on every address by default) now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def chunk_named_params_by_size(
    named_params: Iterable[tuple[str, Any]], chunk_size: int
) -> Iterator[list]:
    """Lists of consecutive (name, tensor) pairs of at most `chunk_size` bytes; a larger tensor gets
    its own list.
    """
    chunk: list[tuple[str, Any]] = []
    size = 0
    for name, param in named_params:
        num_bytes = param.numel() * param.element_size()
        if chunk and size + num_bytes > chunk_size:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, param))
        size += num_bytes
    if chunk:
        yield chunk


def free_host_bytes() -> int | None:
    """Bytes of main memory that this machine may still use; None where the kernel does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
