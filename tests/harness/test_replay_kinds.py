"""Every way to train, recorded in a real run and replayed: each stage of each rollout, and the training
itself, bit for bit.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support import small_run

from slime.harness.replay import command

NUM_GPUS = 0

ROOT = Path(__file__).resolve().parents[2]
PLUG_IN = "support.training_plugins."
# by name: options beside those of the small run, options of it that are left out
KINDS = {
    "ppo": "--advantage-estimator ppo --num-critic-only-steps 1 --use-kl-loss --kl-loss-coef 0.1 --ref-load {data}/model",
    "moe": "--local",
    "async": "",
    "async_old_actor": "--global-batch-size 32 --update-weights-interval 2 --keep-old-actor",
    "fully_async": "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async",
    "sft": "--loss-type sft_loss --rollout-function-path slime.rollout.sft_rollout.generate_rollout --input-key messages "
    "--debug-train-only --disable-compute-advantages-and-returns --prompt-data {data}/sft.jsonl --n-samples-per-prompt 1 "
    "--rollout-batch-size 32 --local",
    "distillation": "--use-opd --opd-type megatron --opd-teacher-load {data}/model --kl-coef 0.1 --bf16 "
    "--advantage-estimator reinforce_plus_plus --normalize-advantages --local",
    "turns": "--custom-generate-function-path examples.calculator.rollout.generate "
    "--custom-rm-path examples.calculator.rollout.exact_answer --rollout-max-response-len 24 --log-multi-turn --local",
    "plug_ins": f"--custom-generate-function-path {PLUG_IN}generate --custom-rm-path {PLUG_IN}group_reward --group-rm "
    f"--reward-key score --custom-reward-post-process-path {PLUG_IN}rewards_above_half "
    f"--rollout-sample-hook-path {PLUG_IN}sample_hook --rollout-sample-filter-path {PLUG_IN}remove_first "
    f"--custom-advantage-function-path {PLUG_IN}advantages --rollout-data-postprocess-path {PLUG_IN}train_data "
    f"--loss-type custom_loss --custom-loss-function-path {PLUG_IN}loss --local",
    "converter": f"--custom-convert-samples-to-train-data-path {PLUG_IN}converted --local",
    "two_ranks": "--actor-num-gpus-per-node 2",
}  # fmt: skip
LEFT_OUT = {
    "sft": ("--custom-rm-path", "--label-key", "--apply-chat-template"),
    "turns": ("--apply-chat-template",),
}
FLAGS = ("--apply-chat-template",)  # without a value


def without(words, left_out):
    """The command line without some options of the small run."""
    kept = iter(words)
    for word in kept:
        if word not in left_out:
            yield word
        elif word not in FLAGS:
            next(kept)


def data_of(kind, folder):
    """Prompts and model of a kind."""
    from examples.addition.prepare import prepare as addition
    from examples.calculator.prepare import prepare as calculator
    from examples.moe.prepare import prepare as moe

    return Path({"moe": moe, "turns": calculator}.get(kind, addition)(folder / "data"))


CHEAPEST = "sft"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind == CHEAPEST else [pytest.mark.slow_layouts])
        for kind in KINDS
    ],
)
def test_every_way_to_train_is_repeated_bit_for_bit(kind, tmp_path, monkeypatch, capsys):
    """Two rollouts (three where they overlap), recorded with the weights before each."""
    data = data_of(kind, tmp_path)
    asynchronous = "async" in kind
    words = [
        *KINDS[kind].format(data=data).split(),
        *("--num-rollout", 3 if asynchronous or kind == "ppo" else 2),
        *("--record", tmp_path / "rec", "--record-weights"),
    ]
    line = small_run.command(data, tmp_path / "run", *words, asynchronous=asynchronous)
    process = small_run.launch([*without(line, LEFT_OUT.get(kind, ()))], tmp_path / "run")
    small_run.finish(process, timeout=600)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    recording = str(tmp_path / "rec")
    assert command.main([recording, "--rescore"]) == 0, capsys.readouterr().out
    assert "could not" not in capsys.readouterr().out
    # a training is a run of its own: of the kind in the suite only that with an optimizer's state
    chosen = ["--rollout", "1"] if kind == CHEAPEST else []
    assert command.main([recording, "--stage", "train", *chosen]) == 0, capsys.readouterr().out
    assert "could not" not in capsys.readouterr().out


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
