"""Makes tests/golden/run, the recorded run that the suite replays, and tests/golden/collapsed, one
whose reward collapsed: `python tests/golden/make_run.py`.

A real `slime train` of a tiny model over three rollouts. Its rollout function is `generate_rollout`
below; engine, gate, rewards, group selection, columns, split, training and recording are the real
ones. Each rollout has six groups, with every kind of trouble:

    group 0   four plain responses of different lengths and rewards
    group 1   multi-turn: the tool's tokens have loss mask 0
    group 2   fan-out, ragged: one execution gives three samples with one rollout_id, beside it two
              single ones; scored by exact_match, the other groups by f1
    group 3   partial rollout: begun by older weights and continued (weight_version_spans), one
              still aborted, one removed from the loss
    group 4   one valid response; the rest empty, cut (penalized), with a token that the vocabulary
              lacks, a NaN log-prob, a reward that is no number, too short
    group 5   equal rewards: the dynamic filter drops it

More executions are valid than fill the steps of --global-batch-size, so that some are trailing;
the groups' order changes with the rollout. Everything follows from the rollout's number; the text of every response is the decoding of its tokens.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUN, COLLAPSED = HERE / "run", HERE / "collapsed"
COLLAPSE = "golden-end-tokens-are-scored"  # the fault of tools/mutants/golden.yaml
CHARS = "0123456789abcdefghijklmnopqrstuvwxyz+=?. \n"
MODEL = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.02,
    "max_position_embeddings": 128,
}
OPTIONS = (
    "--rollout-function-path make_run.generate_rollout --disable-rollout-global-dataset "
    "--dynamic-sampling-filter-path "
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std "
    "--rollout-batch-size 4 --n-samples-per-prompt 4 --global-batch-size 8 "
    "--use-dynamic-batch-size --max-tokens-per-gpu 128 --rollout-max-response-len 32 "
    "--rollout-max-context-len 96 --rollout-temperature 0.8 --partial-rollout "
    "--rm-type f1 --length-penalty soft_overlong --length-penalty-weight 0.3 "
    "--length-penalty-buffer 16 --gate-failure-reward -0.5 --gate-min-response-tokens 4 "
    "--use-tis --tis-clip 1.1 --use-kl-loss --kl-loss-coef 0.05 --kl-loss-type low_var_kl "
    "--entropy-coef 0.01 --normalize-advantages --eps-clip 0.02 --eps-clip-high 0.03 "
    "--lr 4e-3 --lr-decay-style linear --lr-decay-iters 12 --lr-warmup-iters 2 --clip-grad 1.0 "
    "--weight-decay 0.1 --colocate --rollout-num-gpus 1 --num-cpus 2 --local "
    "--sglang-enable-deterministic-inference --data-pad-size-multiplier 16 "
    "--no-live-view --no-write-report --logprob-diff-alarm 1"
).split()
POLICIES = '{"truncated": "penalize"}'
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "SLIME_ACCELERATOR": "cpu",
}


# --- the rollout function -------------------------------------------------------------------------


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The groups of one rollout, scored and filtered by the functions of the real one."""
    from slime.rollout.group_selection import GroupSelection

    script = Script(args, rollout_id)
    groups = script.groups()
    selection = GroupSelection(args, rollout_id)
    kept = []
    for number, group in enumerate(groups):
        asyncio.run(_score(args, _flat(group)))
        verdict = selection.verdict_against(group, remaining=len(groups), num_kept=number)
        if verdict is None:
            kept.append(group)
        else:
            selection.drop_filtered(verdict, group)
    return selection.output(kept)


async def _score(args: Any, group: list[Any]) -> None:
    from slime.rollout.scoring import score_group
    from slime.rollout.sglang_rollout import GenerateState

    await score_group(args, group, GenerateState(args).gate)


def _flat(group: list[Any]) -> list[Any]:
    return [one for member in group for one in (member if isinstance(member, list) else [member])]


class Script:
    """The responses of one rollout."""

    def __init__(self, args: Any, rollout_id: int) -> None:
        from slime.utils.processing_utils import shared_tokenizer

        self.args, self.rollout_id = args, rollout_id
        self.tokenizer = shared_tokenizer(args.hf_checkpoint)
        self.random = random.Random(f"golden {rollout_id}")
        self.next_index = 100 * rollout_id
        self.next_group = 10 * rollout_id

    def groups(self) -> list[list[Any]]:
        """Six groups."""
        made = [self.plain, self.multi_turn, self.fan_out, self.partial, self.invalid, self.equal]
        turn = self.rollout_id % 3  # another group is the last one, whose rollouts are trailing
        return [self._numbered(make) for make in (*made[turn:], *made[:turn])]

    def _numbered(self, make: Any) -> list[Any]:
        group = make()
        for one in _flat(group):
            one.group_index = self.next_group
        self.next_group += 1
        return group

    # --- pieces -----------------------------------------------------------------------------------

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def sample(self, question: str, label: str, **metadata: Any) -> Any:
        """A prompt without a response."""
        from slime.data.sample import Sample

        message = [{"role": "user", "content": question}]
        prompt = self.tokenizer.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True
        )
        one = Sample(
            index=self.next_index, prompt=prompt, label=label, metadata=dict(metadata),
            tokens=self.ids(prompt), session_id=f"session {self.next_index}",
        )  # fmt: skip
        self.next_index += 1
        return one

    def say(self, one: Any, text: str, *, end: str | None = "stop", version: int = 0) -> Any:
        """Appends what the policy of a weight version sampled; `end`: the engine's reason."""
        ids = self.ids(text)
        # near the log-probs of an untrained model over the vocabulary, as another engine has them
        level = -math.log(len(self.tokenizer))
        log_probs = [round(level + self.random.gauss(0, 0.15), 4) for _ in ids]
        meta: dict[str, Any] = {"weight_version": str(version or self.rollout_id + 1)}
        if end is not None:
            meta["finish_reason"] = {"type": end}
        one.append_response_tokens(
            self.args, tokens=ids, log_probs=log_probs, meta_info=meta, text=text
        )
        return one

    def tool(self, one: Any, text: str) -> Any:
        """Appends what a tool answered."""
        one.append_response_tokens(self.args, tokens=self.ids(text), text=text, trainable=False)
        return one

    def words(self, answer: str, number: int) -> str:
        """An answer among so many other words."""
        others = [
            self.random.choice("so it is then by sum we get to".split()) for _ in range(number)
        ]
        return " ".join([*others, answer]) + "<|im_end|>"

    # --- groups -----------------------------------------------------------------------------------

    def plain(self) -> list[Any]:
        lengths = self.random.sample(range(6), 4)
        members = [self.sample("40+2?", "forty two") for _ in lengths]
        answers = ("forty two", "forty", "two by two", "nine")
        return [
            self.say(one, self.words(answer, length))
            for one, answer, length in zip(members, answers, lengths, strict=True)
        ]

    def multi_turn(self) -> list[Any]:
        members = [self.sample("use the tool. 3+4?", "seven") for _ in range(4)]
        for place, one in enumerate(members):
            self.say(one, f"sum {3 + place}+4<|im_end|>", end=None)
            self.tool(one, f"\n<|im_start|>tool\n{7 + place}<|im_end|>\n")
            self.say(one, "seven<|im_end|>" if place % 2 == 0 else "it is eight<|im_end|>")
        return members

    def fan_out(self) -> list[Any]:
        first = [self.sample("split 9?", "nine", rm_type="exact_match") for _ in range(3)]
        for one, text in zip(first, ("nine", "three", "nine"), strict=True):
            one.rollout_id = first[0].index
            self.say(one, text + "<|im_end|>")
        others = [self.sample("split 9?", "nine", rm_type="exact_match") for _ in range(2)]
        self.say(others[0], "four and five<|im_end|>")
        self.say(others[1], "nine<|im_end|>")
        return [first, *others]

    def partial(self) -> list[Any]:
        members = [self.sample("count up?", "one two three") for _ in range(4)]
        older = max(self.rollout_id, 1)
        for one in members:
            one.metadata["start_rollout_id"] = max(self.rollout_id - 1, 0)
            self.say(one, "one two", end="abort", version=older)
        self.say(members[0], " three<|im_end|>")
        self.say(members[1], " four five<|im_end|>")
        self.say(members[2], " three six<|im_end|>")
        members[2].remove_sample = True
        return members  # the last one is still aborted

    def invalid(self) -> list[Any]:
        members = [self.sample("say ten?", "ten") for _ in range(8)]
        good, empty, cut, foreign, broken, scored, short, second = members
        self.say(good, "ten<|im_end|>")
        self.say(empty, "")
        self.say(cut, "ten and then the words go on and", end="length")
        self.say(foreign, "ten<|im_end|>")
        foreign.tokens[-2] = len(self.tokenizer) + 40
        self.say(broken, "ten then<|im_end|>")
        broken.rollout_log_probs[3] = math.nan
        self.say(scored, "ten so<|im_end|>")
        scored.reward = math.nan
        self.say(short, "a<|im_end|>")
        self.say(second, "we get ten<|im_end|>")
        return members

    def equal(self) -> list[Any]:
        members = [self.sample("say five?", "five") for _ in range(4)]
        return [self.say(one, "five<|im_end|>") for one in members]


# --- making it ------------------------------------------------------------------------------------


def train(folder: Path, *options: str, code: Path = ROOT) -> Path:
    """Runs the training in `folder` with the code in `code`, and returns its recording."""
    from slime.testing.tiny_models import make_tiny_checkpoint

    make_tiny_checkpoint(folder / "model", chars=CHARS, **MODEL)
    path = os.pathsep.join([str(code), str(HERE)])
    command = [
        sys.executable, "-m", "slime.train", *OPTIONS, "--gate-policies", POLICIES,
        "--hf-checkpoint", "model", "--run-dir", "run", "--record", "recording", *options,
    ]  # fmt: skip
    subprocess.run(
        command, cwd=folder, check=True, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    )
    return folder / "recording"


def make_run() -> Path:
    """Replaces tests/golden/run."""
    from slime.harness.golden_cut import cut

    with tempfile.TemporaryDirectory(prefix="slime-golden-") as folder:
        recording = train(Path(folder), "--num-rollout", "3", "--record-weights")
        shutil.rmtree(RUN, ignore_errors=True)
        cut(recording, RUN)
    return RUN


def make_collapsed() -> Path:
    """Replaces tests/golden/collapsed: two rollouts of the same run by a version of slime whose
    scorers read the token that ends a response. docs/harness.md finds it.
    """
    sys.path.insert(0, str(ROOT / "tools" / "mutants"))
    from golden import read_golden_faults
    from run import copy_repository

    from slime.harness.golden_cut import cut

    (fault,) = (one.fault for one in read_golden_faults() if one.fault.id == COLLAPSE)
    with tempfile.TemporaryDirectory(prefix="slime-golden-") as folder:
        code = Path(folder) / "code"
        code.mkdir()
        copy_repository(code)
        (code / fault.file).write_text(fault.apply(code), encoding="utf-8")
        (Path(folder) / "work").mkdir()
        recording = train(Path(folder) / "work", "--num-rollout", "2", code=code)
        shutil.rmtree(COLLAPSED, ignore_errors=True)
        cut(recording, COLLAPSED)
    return COLLAPSED


def main() -> None:
    """Makes both."""
    for path in (make_run(), make_collapsed()):
        size = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
        print(f"{path.relative_to(ROOT)}: {size / 2**20:.2f} MiB")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
