"""No function on the training ranks trains a token that the gate, or a mask, took out; the ledger
counts what it takes out itself."""

import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
import torch
from support.manager import dirty_rollout, manager_of

from slime.backends.megatron_utils import loss
from slime.backends.megatron_utils.data import to_train_device
from slime.backends.megatron_utils.trained_samples import (
    find_not_trained,
    have_trainable_tokens,
    same_samples,
)
from slime.data.ledger import finished_metrics
from slime.exceptions import RolloutDataError
from slime.utils.data import process_rollout_data
from slime.utils.misc import Box

NUM_GPUS = 0
OPTION = "--rollout-data-postprocess-path"


def local_batches(tmp_path, monkeypatch):
    """(the batches of two data-parallel ranks, the rollout's planned samples). Sample 0 lacks its
    second log-prob, sample 2 is removed by the user.
    """
    samples = dirty_rollout()
    samples[0].rollout_log_probs[1] = None
    samples[2].remove_sample = True
    manager = manager_of(samples, tmp_path, monkeypatch, gate_missing_log_probs="mask")
    boxes = [Box(copy.deepcopy(box.inner)) for box in manager.generate(0)]
    manager.gate.close()
    monkeypatch.setattr("slime.ray.actors.get", lambda shard, **_: shard)
    batches = [
        to_train_device(process_rollout_data(None, boxes, rank, 2), "cpu") for rank in (0, 1)
    ]
    return batches, manager.logged["rollout/ledger/planned"]


def trained_tokens(batches):
    """{(sample, response token): its id} of everything with a mask that is not 0."""
    found = {}
    for batch in batches:
        for index, tokens, mask in zip(
            batch["sample_indices"], batch["tokens"], batch["loss_masks"], strict=True
        ):
            response = np.asarray(tokens)[len(tokens) - len(mask) :]
            found |= {
                (int(index), int(place)): int(response[place])
                for place in np.flatnonzero(np.asarray(mask))
            }
    return found


def rejected_tokens(batch):
    """The response of the cut sample 14 in place of the first sample's."""
    cut = dirty_rollout()[14].tokens
    batch["tokens"] = [
        torch.tensor((list(tokens) + cut)[-len(tokens) :]) if i == 0 else tokens
        for i, tokens in enumerate(batch["tokens"])
    ]


def set_entry(name, row, value):
    def hook(batch):
        entries = list(batch[name])
        entries[row] = value(entries[row])
        batch[name] = entries

    return hook


def unmask_in_place(batch):
    for mask in batch["loss_masks"]:
        mask.fill_(1)


def one_row_more(batch):
    for name in ("tokens", "loss_masks", "response_lengths", "total_lengths"):
        batch[name] = [*batch[name], batch[name][0]]


REFUSED = {
    "unmasks all": (
        lambda b: b.update(loss_masks=[torch.ones_like(m) for m in b["loss_masks"]]),
        "loss mask of response token 1 of sample 0 to 1",
    ),
    "unmasks in place": (unmask_in_place, "loss mask of response token 1 of sample 0 to 1"),
    "tokens of a rejected sample": (rejected_tokens, "changed 'tokens'"),
    "a token in place": (lambda b: b["tokens"][1].add_(1), "changed 'tokens'"),
    "a sample twice": (one_row_more, "changed 'tokens'"),
    "a longer response": (
        set_entry("response_lengths", 0, lambda n: n + 1),
        "changed 'response_lengths'",
    ),
    "another micro-batch": (
        set_entry("micro_batch_indices", 0, lambda rows: [*rows, 0]),
        "changed 'micro_batch_indices'",
    ),
    "fewer steps": (lambda b: b.update(num_microbatches=[]), "changed 'num_microbatches'"),
    "shorter masks": (
        set_entry("loss_masks", 0, lambda mask: mask[1:]),
        "changed the lengths of 'loss_masks'",
    ),
    "no masks": (lambda b: b.pop("loss_masks"), "changed the lengths of 'loss_masks'"),
}
ALLOWED = {
    "looks": lambda b: None,
    "masks a token": set_entry(
        "loss_masks", 1, lambda mask: torch.cat([torch.zeros_like(mask[:1]), mask[1:]])
    ),
    "says that all are valid": lambda b: b.update(valid=[True] * len(b["tokens"])),
    "rewards": lambda b: b.update(rewards=[9.0] * len(b["tokens"])),
    "the same masks as numbers": lambda b: b.update(
        loss_masks=[mask.float() for mask in b["loss_masks"]]
    ),
}


def call(hook, batches):
    for batch in batches:
        with same_samples(batch, OPTION, "user_plug_in.f"):
            hook(batch)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_hook_that_trains_what_the_split_did_not_plan_is_refused(kind, tmp_path, monkeypatch):
    """A hook that trains what the split did not plan is refused with option, function and what it
    changed."""
    hook, words = REFUSED[kind]
    batches, _ = local_batches(tmp_path, monkeypatch)
    with pytest.raises(RolloutDataError, match=f"{OPTION} user_plug_in.f .*{words}"):
        call(hook, batches)


@pytest.mark.parametrize("kind", ALLOWED)
def test_a_hook_that_changes_numbers_or_masks_tokens_trains_nothing_else(
    kind, tmp_path, monkeypatch
):
    """A hook may change numbers and mask tokens; masked tokens of sample 0, and all of the removed
    sample 2, still do not train."""
    batches, planned = local_batches(tmp_path, monkeypatch)
    before = trained_tokens(batches)
    assert (
        planned == 10
        and (0, 0) in before
        and (0, 1) not in before
        and not {place for index, place in before if index == 2}
    )
    trainable = [have_trainable_tokens(batch) for batch in batches]
    call(ALLOWED[kind], batches)
    after = trained_tokens(batches)
    assert after.items() <= before.items() and len(before) - len(after) == (
        2 if kind == "masks a token" else 0
    )
    for batch, had in zip(batches, trainable, strict=True):
        assert find_not_trained(batch, trainable_before=had, skipped_steps=[]) == {}


def test_samples_that_a_hook_masks_or_whose_step_is_skipped_are_planned_and_did_not_train(
    tmp_path, monkeypatch
):
    """Of 10 planned samples each of two ranks masks one, and where the step is skipped the other 8
    did not train either."""
    batches, planned = local_batches(tmp_path, monkeypatch)
    trainable = [have_trainable_tokens(batch) for batch in batches]
    first = [had.index(True) for had in trainable]
    for batch, row in zip(batches, first, strict=True):
        call(set_entry("loss_masks", row, torch.zeros_like), [batch])
    for skipped, expected in (
        ([], {"masked_by_function": 2}),
        ([0], {"masked_by_function": 2, "update_skipped": 8}),
    ):
        gone = {}
        for batch, had in zip(batches, trainable, strict=True):
            for reason, indices in find_not_trained(
                batch, trainable_before=had, skipped_steps=skipped
            ).items():
                gone[reason] = gone.get(reason, 0) + len(indices)
        assert gone == expected
        assert finished_metrics(planned, gone)["rollout/ledger/trained"] == 10 - sum(
            expected.values()
        )


def test_only_the_samples_of_a_skipped_step_did_not_train():
    """Of two steps of two micro-batches only the skipped one's samples did not train; of its three,
    one had no trainable token anyway."""
    batch = {
        "loss_masks": [torch.ones(2)] * 5,
        "rollout_mask_sums": torch.tensor([2.0, 2.0, 2.0, 0.0, 2.0]),
        "num_microbatches": [2, 2],
        "micro_batch_indices": [[0], [1], [2, 3], [4]],
        "sample_indices": torch.tensor([10, 11, 12, 13, 14]),
    }
    assert find_not_trained(batch, trainable_before=None, skipped_steps=[1]) == {
        "update_skipped": [12, 14]
    }
    assert find_not_trained(batch, trainable_before=None, skipped_steps=[]) == {}


def test_more_samples_than_were_planned_cannot_have_not_trained():
    """More untrained samples than planned ones are an error, as where two ranks count the same
    sample."""
    assert finished_metrics(4, {"update_skipped": 4}) == {
        "rollout/ledger/trained": 0,
        "rollout/ledger/not_trained/update_skipped": 4,
    }
    with pytest.raises(RolloutDataError, match="5 samples did not train .*only 4 were planned"):
        finished_metrics(4, {"update_skipped": 3, "masked_by_function": 2})


def correction(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **lengths):
    """Takes the first token out and puts the second one in."""
    return pg_loss, [torch.tensor([0.0, 1.0, 1.0])], {}


def test_a_correction_takes_tokens_out_and_puts_none_in(monkeypatch):
    """A custom correction that returns the mask 0 1 1 for 1 0 1 trains the third token alone."""
    monkeypatch.setattr(loss, "load_function", lambda path: correction)
    config = type("Config", (), {"custom_tis_function_path": "user_plug_in.f", "use_tis": True})
    tokens = type(
        "Tokens",
        (),
        {
            "select": staticmethod(lambda values, name: values),
            "split": staticmethod(lambda values: [values]),
        },
    )
    batch = {
        "rollout_log_probs": torch.zeros(3),
        "loss_masks": [torch.tensor([1, 0, 1])],
        "total_lengths": [4],
        "response_lengths": [3],
    }
    _, masks, _ = loss._correct_off_policy(
        None, config, batch, tokens, torch.zeros(3), torch.zeros(3)
    )
    assert [mask.tolist() for mask in masks] == [[0.0, 0.0, 1.0]]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
