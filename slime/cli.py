"""The console script `slime`: one word chooses the command; only its modules are imported.

`train` and `train-async` read upstream's flags (`slime.utils.arguments`); our own commands are
dataclasses or functions that tyro turns into a command line.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence

from slime import __version__
from slime.config.specs import nearest_names
from slime.exceptions import SlimeError
from slime.tracking.plain_output import keep_output_plain

BROKEN_PIPE = 128 + 13  # as a shell tells that SIGPIPE ended a command


@dataclasses.dataclass(frozen=True)
class Command:
    """One subcommand. `entry` is "module:function"; the function takes a list of words when `raw`,
    else tyro calls it.
    """

    entry: str
    help: str
    raw: bool = False


COMMANDS: dict[str, Command] = {
    "train": Command(
        "slime.commands.launch:train",
        "Train: generate, score, update, publish the weights; one after the other.",
        raw=True,
    ),
    "train-async": Command(
        "slime.commands.launch:train_async",
        "Train with the next rollout generated while this one is trained on.",
        raw=True,
    ),
    "supervise": Command(
        "slime.commands.supervise:main",
        "Restart a training run that fails, from its last checkpoint, a bounded number of times.",
        raw=True,
    ),
    "serve": Command(
        "slime.backends.torch_engine.serve:serve",
        "Serve a Hugging Face folder over SGLang's HTTP API.",
    ),
    "doctor": Command(
        "slime.commands.doctor:doctor", "Check this machine: one line and one remedy each."
    ),
    "consistency": Command(
        "slime.harness.consistency_report:main",
        "Where trainer and engine disagree in a run, token by token.",
        raw=True,
    ),
    "diff": Command(
        "slime.harness.diff.command:main",
        "Compare two recordings or dumps field by field and name the first difference.",
        raw=True,
    ),
    "audit": Command(
        "slime.harness.audit.command:main",
        "Read what any RL framework wrote about a run and say what is wrong with it.",
        raw=True,
    ),
    "bisect": Command(
        "slime.harness.bisect:main",
        "Find the commit from which on a recording comes out otherwise.",
        raw=True,
    ),
    "replay": Command(
        "slime.harness.replay.command:main",
        "Run stages of a recorded rollout again and compare.",
        raw=True,
    ),
    "golden": Command(
        "slime.harness.golden:main",
        "Small recordings that are replayed in every continuous integration.",
        raw=True,
    ),
    "rewards": Command(
        "slime.commands.reward:rewards",
        "Check that the labels of a prompt file can be answered right.",
        raw=True,
    ),
    "rescore": Command(
        "slime.commands.reward:rescore",
        "Score a rollout dump again and show what changed.",
        raw=True,
    ),
    "show": Command(
        "slime.harness.show:main",
        "A recording or a rollout dump; one sample, token by token.",
        raw=True,
    ),
    "view": Command(
        "slime.view.command:main",
        "Look at runs and recordings in a browser: curves, samples, every token.",
        raw=True,
    ),
    "top": Command(
        "slime.harness.top:main",
        "What a run is doing, in this terminal, also of one that was started elsewhere.",
        raw=True,
    ),
    "report": Command(
        "slime.view.report_command:main",
        "What a run did and what does not add up; as one HTML file with --html.",
        raw=True,
    ),
    "trace": Command(
        "slime.harness.trace:main",
        "What each process of a run did when: a table, and a file for ui.perfetto.dev.",
        raw=True,
    ),
    "ledger": Command(
        "slime.harness.ledger:main",
        "Prove from a run's files that no sample was lost or trained twice, over all restarts.",
        raw=True,
    ),
    "gate": Command(
        "slime.commands.gate:main", "Look at, compare and tune the response gate.", raw=True
    ),
}


def available_commands() -> dict[str, Command]:
    """Returns the commands whose module is part of this installation."""
    return {
        name: command
        for name, command in COMMANDS.items()
        if _module_exists(command.entry.partition(":")[0])
    }


def _module_exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def usage(commands: dict[str, Command]) -> str:
    """Returns the help page of `slime`."""
    width = max(map(len, commands)) + 2
    lines = [
        f"slime {__version__}: reinforcement learning for language models",
        "",
        "usage: slime COMMAND [OPTIONS]",
        "",
    ]
    lines += [f"  {name:{width}}{command.help}" for name, command in commands.items()]
    return "\n".join(
        [
            *lines,
            "",
            "slime COMMAND --help shows the options of a command; slime --version the version.",
        ]
    )


def load_entry(command: Command) -> Callable:
    """Imports the command's function."""
    module, _, function = command.entry.partition(":")
    return getattr(importlib.import_module(module), function)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 2 for a command line that cannot be, else the
    command's own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    commands = available_commands()
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(commands), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] in ("--version", "-V", "version"):
        print(f"slime {__version__}")
        return 0
    keep_output_plain()
    name, rest = words[0], words[1:]
    if name not in commands:
        near = nearest_names(name, commands)
        hint = f" Did you mean {near[0]}?" if near else f" Commands: {', '.join(commands)}."
        print(f"error: unknown command {name!r}.{hint}", file=sys.stderr)
        return 2
    try:
        return _run(name, commands[name], rest)
    except SlimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return BROKEN_PIPE


def _nobody_reads() -> bool:
    """Whether who read the output has gone, as of `slime audit RUN | head`. Nothing more is printed
    then.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _run(name: str, command: Command, words: list[str]) -> int:
    function = load_entry(command)
    if command.raw:
        return int(function(words) or 0)
    import tyro

    # A command whose options are one dataclass has --port, not --command.port.
    config = (tyro.conf.OmitArgPrefixes,)
    return int(
        tyro.cli(
            function, prog=f"slime {name}", description=command.help, args=words, config=config
        )
        or 0
    )


if __name__ == "__main__":
    raise SystemExit(main())
