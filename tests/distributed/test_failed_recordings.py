"""Whatever fails on one rank while it records, every rank goes on to the same collective, the run has
its numbers, and the recording ends with one warning.
"""

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch
import torch.distributed as dist
from support.distributed import run_distributed
from support.megatron_worker import LENGTHS, built, local_batch
from support.tiny_models import make_tiny_checkpoint

NUM_GPUS = 0


class Broken:
    """A value of a plug-in that nothing can be asked."""

    def __len__(self):
        raise RuntimeError("nobody counts this")


class Uneven(list):
    """As many entries as samples, none of which can be read."""

    def __iter__(self):
        raise MemoryError("no room for a copy")


def digest_fails(patch, data):
    from slime.backends.megatron_utils import recorder

    def refuse(tensor):
        raise MemoryError("no room for a digest")

    patch.setattr(recorder, "_digest", refuse)


def weights_fail(patch, data):
    return OSError(28, "No space left on device")


def nothing_can_be_asked(patch, data):
    data["a_plug_ins"] = Broken()


def entries_cannot_be_read(patch, data):
    data["loss_masks"] = Uneven(data["loss_masks"])


def no_table_can_be_begun(patch, data):
    from slime.backends.megatron_utils import recorder

    def refuse(*args):
        raise KeyError("no such header")

    patch.setattr(recorder, "TensorCollector", refuse)


FAULTS = (
    digest_fails,
    weights_fail,
    nothing_can_be_asked,
    entries_cannot_be_read,
    no_table_can_be_begun,
)


class Warnings(logging.Handler):
    """Keeps what a rank warns of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


def _two_rollouts(state, args, root, fault, is_victim):
    """(sum over ranks after each rollout, what was warned of)."""
    from slime.backends.megatron_utils.recorder import TrainRecorder
    from slime.data.batch import RolloutBatch, Stage

    recorder = TrainRecorder(
        argparse.Namespace(
            record=str(root), record_every=1, record_weights=True, record_keep=None,
            record_max_gib=None,
        ),
        "actor",
    )  # fmt: skip
    heard, sums = Warnings(), []
    logging.getLogger("slime").addHandler(heard)
    try:
        for rollout_id in (0, 1):
            data, mine = local_batch(args)
            data = RolloutBatch(
                data | {"partition": mine}, stage=Stage.LOCAL, info={"num_whole": len(LENGTHS)}
            )
            failure = None
            with pytest.MonkeyPatch.context() as patch:
                if is_victim and rollout_id == 0:
                    failure = fault(patch, data)

                def save(folder, failure=failure):
                    dist.barrier()
                    if failure is not None:
                        raise failure

                with recorder.rollout(rollout_id, state[0], save):
                    recorder.fields(rollout_id, data)
                    total = torch.tensor([float(dist.get_rank() + 1)])
                    dist.all_reduce(total)  # what training does next
            sums.append(total.item())
        recorder.close()
    finally:
        logging.getLogger("slime").removeHandler(heard)
    return sums, heard.said


def _faults(rank, world_size, folder, root):
    """By fault and victim: sums by rank, warnings by rank."""
    found = {}
    with built(folder) as (args, *state):
        for fault in FAULTS:
            for victim in range(world_size):
                place = Path(root) / f"{fault.__name__}_{victim}"
                if rank == 0:
                    place.mkdir()
                dist.barrier()
                own = _two_rollouts(state, args, place, fault, rank == victim)
                everyone = [None] * world_size
                dist.all_gather_object(everyone, own)
                found[fault.__name__, victim] = everyone
    return found


@pytest.mark.timeout(150)
def test_what_fails_on_one_rank_of_a_recording_ends_it_on_all(tmp_path):
    """A digest, the weights, a field of a plug-in, a table: the ranks' next sum is right, and the
    main rank warns once."""
    make_tiny_checkpoint(tmp_path / "model")
    (found, _) = run_distributed(_faults, 2, str(tmp_path / "model"), str(tmp_path), timeout=120)
    for (fault, victim), ranks in found.items():
        assert [sums for sums, _ in ranks] == [[3.0, 3.0]] * 2, (fault, victim)
        said = [text for _, texts in ranks for text in texts if "record" in text]
        is_met = fault != "no_table_can_be_begun" or victim == 0  # the other rank begins none
        assert len(said) == is_met, (fault, victim, said)
        if is_met and fault != "weights_fail":
            assert "has stopped" in said[0] and "no longer" not in said[0], said
            assert not (tmp_path / f"{fault}_{victim}" / "rollout_000001").exists()
        elif is_met:
            assert "weights are no longer recorded: rank" in said[0]
            assert (tmp_path / f"{fault}_{victim}" / "rollout_000001" / "steps.jsonl").exists()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
