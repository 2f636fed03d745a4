"""Checks the options against this machine: files that must exist, folders that must be writable,
ports that must be free.

Like `rules`, each returns sentences; unlike them, these look at the disk and the network, so they
run last and only here.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

from slime.config.derive import (
    CHECKPOINT_TRACKER,
    cuda_is_usable,
    devices_needed,
    has_megatron_checkpoint,
    is_hf_folder,
    uses_cuda,
    why_no_cuda,
)
from slime.config.megatron import FIXED_ON_CPU
from slime.config.option import flag_of
from slime.config.regular_files import kind_of
from slime.config.specs import nearest_names

MODEL_FOLDERS = ("hf_checkpoint", "ref_load", "opd_teacher_load", "critic_load")
FILES = ("eval_config", "custom_config_path", "megatron_config_path")
WRITABLE = ("save", "critic_save", "dump_details", "run_dir", "update_weight_disk_dir", "record")
WRITTEN = (*WRITABLE, "save_hf", "save_debug_rollout_data", "save_debug_train_data")
READ = ("load_debug_rollout_data", "load", "critic_load", *MODEL_FOLDERS)


def machine_problems(args: argparse.Namespace) -> list[str]:
    """Returns one sentence per thing on this machine that the options need and that
    is not there.
    """
    checks: tuple[Callable[[argparse.Namespace], list[str]], ...] = (
        model_folders_exist,
        resume_folder_has_a_checkpoint,
        pointers_are_numbers,
        save_folder_is_this_runs,
        first_iteration_is_one,
        replay_keeps_what_it_reads,
        recording_keeps_what_it_reads,
        recording_is_of_this_run,
        files_exist,
        folders_can_be_written,
        ports_are_free,
        packages_are_installed,
        cuda_is_here,
        nothing_asks_a_cpu_for_cuda_kernels,
        devices_are_enough,
        weights_have_a_way,
    )
    return [problem for check in checks for problem in check(args)]


def missing_path(flag: str, path: str, what: str) -> str:
    """Returns the sentence about a path that does not exist, with the nearest names that do."""
    if os.path.lexists(Path(path).expanduser()):
        return f"{flag} {path} is no {what} but {kind_of(Path(path).expanduser())}."
    parent = Path(path).expanduser().absolute().parent
    known = parent
    while not known.is_dir():
        known = known.parent
    if known != parent:
        return (
            f"{flag} {path}: no such {what}; {known} exists, but has no "
            f"{parent.relative_to(known).parts[0]!r}."
        )
    near = nearest_names(Path(path).name, sorted(entry.name for entry in parent.iterdir()), count=3)
    hint = (
        f" Did you mean {' or '.join(str(Path(path).parent / name) for name in near)}?"
        if near
        else f" Nothing in {parent} has a name like it."
    )
    return f"{flag} {path}: no such {what}.{hint}"


def model_folders_exist(args: argparse.Namespace) -> list[str]:
    """--hf-checkpoint and the other model folders are folders; --hf-checkpoint has a
    config.json.
    """
    problems = []
    for name in MODEL_FOLDERS:
        path = getattr(args, name)
        if path is None or (name == "opd_teacher_load" and not args.use_opd):
            continue
        if not Path(path).is_dir():
            hub = (
                " A name on the Hugging Face hub must be downloaded first."
                if re.fullmatch(r"[\w.-]+/[\w.-]+", path)
                else ""
            )
            problems.append(missing_path(flag_of(name), path, "folder") + hub)
        elif name == "hf_checkpoint" and not is_hf_folder(path):
            problems.append(
                f"--hf-checkpoint {path} has no config.json: it is not a Hugging Face model folder."
            )
        elif (
            name != "hf_checkpoint" and not is_hf_folder(path) and not has_megatron_checkpoint(path)
        ):
            problems.append(
                f"{flag_of(name)} {path} holds neither a Megatron checkpoint nor a Hugging Face "
                "model."
            )
    return problems


def resume_folder_has_a_checkpoint(args: argparse.Namespace) -> list[str]:
    """--load leads to something. The folder that --save writes may still be empty: that is the
    first start of a run.
    """
    load = args.as_requested["load"]
    if load is None or has_megatron_checkpoint(load) or is_hf_folder(load):
        return []
    if args.save is not None and Path(load).absolute() == Path(args.save).absolute():
        return []
    if not Path(load).is_dir():
        return [
            missing_path("--load", load, "folder")
            + " (With --save on the same folder a first start is fine.)"
        ]
    return [
        (
            f"--load {load} holds no published checkpoint and no Hugging Face model. Correct the "
            "path, "
            "or leave --load out to start anew."
        )
    ]


def pointers_are_numbers(args: argparse.Namespace) -> list[str]:
    """The file that names the latest checkpoint of a folder holds a number, where it is asked."""
    asked = (("load", "ckpt_step"), ("ref_load", "ref_ckpt_step"))
    problems = []
    for name, step in asked:
        folder = args.as_requested["load"] if name == "load" else getattr(args, name)
        if not has_megatron_checkpoint(folder) or getattr(args, step) is not None:
            continue
        path = Path(folder) / CHECKPOINT_TRACKER
        text = path.read_text(encoding="utf-8", errors="replace").strip()
        if not re.fullmatch(r"[0-9]{1,9}", text):
            problems.append(
                f"{flag_of(name)} {folder}: {CHECKPOINT_TRACKER} holds {text[:40]!r}, not the "
                f"number of an iteration. Write that of the last iter_* folder into it, or give "
                f"{flag_of(step)}."
            )
    return problems


def save_folder_is_this_runs(args: argparse.Namespace) -> list[str]:
    """A run writes over no checkpoints but those that it goes on from."""
    load = args.as_requested["load"]
    if not has_megatron_checkpoint(args.save) or (
        load is not None and os.path.realpath(load) == os.path.realpath(args.save)
    ):
        return []
    latest = (
        (Path(args.save) / CHECKPOINT_TRACKER)
        .read_text(encoding="utf-8", errors="replace")
        .strip()[:20]
    )
    return [
        f"--save {args.save} holds checkpoints of another run (the latest is {latest}), and this "
        "run would write over them one by one. Go on from "
        f"them with --load {args.save}, or give another folder."
    ]


def first_iteration_is_one(args: argparse.Namespace) -> list[str]:
    """A first start takes the reference's iteration; --ckpt-step cannot ask for
    another one there.
    """
    load = args.as_requested["load"]
    fresh = (
        not has_megatron_checkpoint(load)
        and not is_hf_folder(load)
        and has_megatron_checkpoint(args.ref_load)
    )
    if not fresh or args.ckpt_step in (None, args.ref_ckpt_step):
        return []
    iteration = (
        "its latest iteration"
        if args.ref_ckpt_step is None
        else f"iteration {args.ref_ckpt_step} (--ref-ckpt-step)"
    )
    return [
        f"--ckpt-step {args.ckpt_step} is an iteration of --load, which has no checkpoint: the "
        f"policy starts from --ref-load, {iteration}. Use "
        f"--ref-ckpt-step {args.ckpt_step} for both, leave --ckpt-step out, or give --load {args.ref_load} --finetune."
    ]


def replay_keeps_what_it_reads(args: argparse.Namespace) -> list[str]:
    """A replay does not write its dumps over those that it reads, under whatever name the folder is
    given.
    """
    read, written = args.load_debug_rollout_data, args.save_debug_rollout_data
    if read is None or written is None:
        return []
    files = []
    for template in (read, written):
        try:
            files.append(
                {os.path.realpath(template.format(rollout_id=name)) for name in (0, "eval_0")}
            )
        except (KeyError, IndexError, ValueError):
            return []  # the rules have named the template
    if not files[0] & files[1]:
        return []
    flag = (
        "--save-debug-rollout-data"
        if args.dump_details is None
        else f"--dump-details {args.dump_details}"
    )
    return [
        (
            f"{flag} would write {written}, the dump that --load-debug-rollout-data reads. Give "
            "the "
            "replay a --dump-details folder of its own."
        )
    ]


def recording_keeps_what_it_reads(args: argparse.Namespace) -> list[str]:
    """Nothing is written into the recording that a run reads its samples or weights from, under
    whatever name its folder is given.
    """
    problems = []
    for source in (getattr(args, name) for name in READ):
        root = None if not source else _recording_above(_place_of(source))
        if root is None:
            continue
        for name in WRITTEN:
            path = getattr(args, name)
            if path is None:
                continue
            written = _place_of(path)
            if written == root or root in written.parents:
                problems.append(
                    f"{flag_of(name)} {path} would write into the recording {root}, which this run "
                    "reads. Give it a folder of its own."
                )
    return list(dict.fromkeys(problems))


def _place_of(template: str) -> Path:
    """The path, or of a template the folder of all its files, without links."""
    fixed, is_template, _ = str(template).partition("{")
    return Path(os.path.realpath(os.path.dirname(fixed) if is_template else fixed))


def _recording_above(path: Path) -> Path | None:
    """The recording that `path` is, or is in."""
    return next((folder for folder in (path, *path.parents) if _is_recording(folder)), None)


def _is_recording(folder: Path) -> bool:
    """Whether the folder holds a recording: its run record says so; one that cannot be read is
    taken for one.
    """
    for path in folder.glob("run_[0-9][0-9][0-9][0-9]*.json"):
        try:
            with open(path, "rb") as file:
                if b'"slime-recording-' in file.read(256):
                    return True
        except OSError:
            return True
    return False


def recording_is_of_this_run(args: argparse.Namespace) -> list[str]:
    """A run that does not resume writes into a recording of its own: it would replace another run's
    rollouts one by one. Checkpoints stand beside the recording: a run that resumes reads them.
    """
    if args.record is None:
        return []
    problems, root = [], _place_of(args.record)
    for name in ("save", "critic_save"):
        path = getattr(args, name)
        if path is not None and root in (_place_of(path), *_place_of(path).parents):
            problems.append(
                f"{flag_of(name)} {path} is inside --record {args.record}, and a run that resumes "
                "from it could not record there. Give the checkpoints a folder of their own."
            )
    load = args.as_requested["load"]
    resumes = load is not None and not is_hf_folder(load) and not args.as_requested["finetune"]
    if not resumes and _is_recording(root):
        problems.append(
            f"--record {args.record} holds the recording of another run, and this run resumes none "
            "(--load). Choose another folder."
        )
    return problems


def files_exist(args: argparse.Namespace) -> list[str]:
    """Files named by options exist."""
    problems = [
        missing_path(flag_of(name), getattr(args, name), "file")
        for name in FILES
        if getattr(args, name) and not Path(getattr(args, name)).is_file()
    ]
    template = args.load_debug_rollout_data
    if (
        template is not None
        and not Path(template).parent.is_dir()
        and "{" not in str(Path(template).parent)
    ):
        problems.append(
            missing_path("--load-debug-rollout-data", str(Path(template).parent), "folder")
        )
    return problems


def folders_can_be_written(args: argparse.Namespace) -> list[str]:
    """Output folders can be made: the nearest existing ancestor is a folder with write
    permission.
    """
    problems = []
    for name in WRITABLE:
        path = getattr(args, name)
        if path is None:
            continue
        ancestor = Path(path).expanduser().absolute()
        while not ancestor.exists():
            ancestor = ancestor.parent
        if not ancestor.is_dir():
            problems.append(f"{flag_of(name)} {path}: {ancestor} is a file, not a folder.")
        elif not os.access(ancestor, os.W_OK):
            problems.append(f"{flag_of(name)} {path}: no permission to write in {ancestor}.")
    return problems


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen on host:port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def ports_are_free(args: argparse.Namespace) -> list[str]:
    """Ports that engines or the router will listen on are free."""
    if args.debug_train_only or args.rollout_external_engine_addrs:
        return []
    problems = []
    if args.sglang_port is not None:
        engines = args.rollout_num_engines or args.rollout_num_gpus // max(
            1, args.rollout_num_gpus_per_engine
        )
        if not 0 < args.sglang_port <= 65536 - max(1, engines):
            return [
                (
                    f"--sglang-port {args.sglang_port} is no usable port for {engines} engines. "
                    "Use "
                    f"1024 to {65536 - engines}."
                )
            ]
        busy = [
            port
            for port in range(args.sglang_port, args.sglang_port + engines)
            if not port_is_free(args.sglang_host, port)
        ]
        problems += [
            (
                f"--sglang-port {args.sglang_port}: port {port} is in use. Leave it out, or choose "
                "another."
            )
            for port in busy
        ]
    starts_router = args.use_sglang_router and args.sglang_router_ip is None
    if (
        starts_router
        and args.sglang_router_port is not None
        and not port_is_free(args.sglang_host, args.sglang_router_port)
    ):
        problems.append(
            f"--sglang-router-port {args.sglang_router_port} is in use. Leave it out, or choose "
            "another."
        )
    return problems


# (why it is needed, package to import, extra of slime-rl that brings it, whether the options need
# it)
OPTIONAL_PACKAGES: tuple[tuple[str, str, str, Callable[[argparse.Namespace], bool]], ...] = (
    ("--use-wandb", "wandb", "wandb", lambda args: args.use_wandb),
    ("--use-tensorboard", "tensorboard", "tensorboard", lambda args: args.use_tensorboard),
    (
        "--use-sglang-router",
        "sglang_router",
        "router",
        lambda args: args.use_sglang_router and args.sglang_router_ip is None,
    ),
    (
        "--rm-type math_verify",
        "math_verify",
        "math",
        lambda args: (args.rm_type or "").endswith("math_verify"),
    ),
    (
        "--prompt-data *.parquet",
        "pyarrow",
        "data",
        lambda args: bool(re.search(r"\.parquet(@\[|$)", str(args.prompt_data))),
    ),
    ("--record", "pyarrow", "data", lambda args: args.record is not None),
    (
        "a dump *.parquet",
        "pyarrow",
        "data",
        lambda args: any(
            str(path).endswith(".parquet")
            for path in (args.save_debug_rollout_data, args.save_debug_train_data)
        ),
    ),
)


def packages_are_installed(args: argparse.Namespace) -> list[str]:
    """Packages that only some options need are installed."""
    return [
        f"{flag} needs the package {package}: pip install 'slime-rl[{extra}]'"
        for flag, package, extra, is_needed in OPTIONAL_PACKAGES
        if is_needed(args) and importlib.util.find_spec(package) is None
    ]


def cuda_is_here(args: argparse.Namespace) -> list[str]:
    """Where CUDA is asked for and the run stays on this machine, torch can use it; one sentence for
    each option where it cannot.
    """
    if args.ray_address or os.environ.get("RAY_ADDRESS") or cuda_is_usable():
        return []
    wanted = [
        f"{flag_of(name)} cuda"
        for name in ("accelerator", "rollout_engine_device")
        if getattr(args, name) == "cuda"
    ]
    from_environment = (
        os.environ.get("SLIME_ACCELERATOR", "").strip().lower()
        if args.accelerator == "auto"
        else ""
    )
    if from_environment not in ("", "cpu", "cuda"):
        return [
            (
                f"SLIME_ACCELERATOR={from_environment!r} in the environment is not known. Use cpu "
                "or "
                "cuda, or unset it."
            )
        ]
    if from_environment == "cuda":
        wanted.append("SLIME_ACCELERATOR=cuda in the environment")
    if args.distributed_backend == "nccl" and not uses_cuda(args.accelerator):
        wanted.append("--distributed-backend nccl")
    return [
        f"{asked}: torch cannot use CUDA here, {why_no_cuda()}. Leave it out to run on the CPU."
        for asked in wanted
    ]


def nothing_asks_a_cpu_for_cuda_kernels(args: argparse.Namespace) -> list[str]:
    """What the model has not on a CPU machine (`FIXED_ON_CPU`) was not asked for."""
    if uses_cuda(args.accelerator):
        return []
    asked = {
        name: getattr(args, name)
        for name in FIXED_ON_CPU
        if getattr(args, name) not in (None, FIXED_ON_CPU[name])
    }
    return [
        (
            f"{flag_of(name)}{'' if value is True else f' {value}'} needs CUDA, and training runs "
            "on "
            "the CPU (--accelerator). Leave it out."
        )
        for name, value in asked.items()
    ]


def devices_are_enough(args: argparse.Namespace) -> list[str]:
    """A private Ray session on this machine has the devices that training and engines ask for."""
    if args.local or args.ray_address or os.environ.get("RAY_ADDRESS"):
        return []
    training, engines = devices_needed(args)
    needed = max(training, engines) if args.colocate else training + engines
    if uses_cuda(args.accelerator):
        available, kind = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))), "GPUs"
    else:
        available, kind = args.num_cpus or os.cpu_count() or 1, "CPU cores"
    if needed <= available or not available:
        return []
    return [
        f"The run needs {needed} {kind}, {available} are here:\n"
        f"       training  {training:4d}   --actor-num-nodes {args.actor_num_nodes} x "
        f"--actor-num-gpus-per-node {args.actor_num_gpus_per_node}\n"
        f"       engines   {engines:4d}   --rollout-num-gpus {args.rollout_num_gpus}\n"
        f"     Lower them, or {'use --ray-address of a cluster' if kind == 'GPUs' else f'let processes share cores with --num-cpus {needed}'}."
    ]


def weights_have_a_way(args: argparse.Namespace) -> list[str]:
    """--update-weight-transport names a way to the engines that exists."""
    if args.update_weight_transport != "nccl":
        return []
    other = (
        "disk --update-weight-disk-dir FOLDER" if args.rollout_external_engine_addrs else "tensor"
    )
    return [
        (
            "--update-weight-transport nccl: trainer and engines have no NCCL group of their own "
            f"here. Use {other}."
        )
    ]
