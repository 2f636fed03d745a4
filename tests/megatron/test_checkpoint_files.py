"""A checkpoint folder is either published as a whole or not there."""

import argparse
import hashlib

import pytest
from support.full_disk import full_disk

from slime.backends.megatron_utils import checkpoint_files as files
from slime.config.resume import resume_point
from slime.exceptions import ConfigError

NUM_GPUS = 0


def _publish(save, iteration, text="weights"):
    temporary = files.temporary_folder(save, iteration)
    (temporary / "deep").mkdir(parents=True)
    (temporary / "a.bin").write_text(text)
    (temporary / "deep" / "b.bin").write_text("deep")
    final = files.iteration_folder(save, iteration)
    files.publish(
        temporary, final, files.hash_files(temporary, files.files_below(temporary), sync=True)
    )
    files.point_to(save, iteration)
    return final


def test_the_latest_or_an_asked_for_iteration_is_found(tmp_path):
    """--load names the folder or an iter_ folder, and --ckpt-step an iteration; without it the
    latest is taken."""
    _publish(tmp_path, 3)
    final = _publish(tmp_path, 12)
    assert files.find_checkpoint(tmp_path, None) == (final, 12)
    assert files.find_checkpoint(tmp_path, 3)[1] == 3
    assert files.find_checkpoint(final, None) == (final, 12)
    assert files.is_megatron_checkpoint(tmp_path) and files.is_megatron_checkpoint(final)
    assert not files.is_megatron_checkpoint(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="no checkpoint of iteration 7. It has 3, 12."):
        files.find_checkpoint(tmp_path, 7)


def test_a_pointer_that_is_not_a_number_is_an_error(tmp_path):
    """A pointer file that is not a number is an error and not a fresh start."""
    _publish(tmp_path, 3)
    absurd = (
        b"9" * 5000,
        b"-3",
        b"3.0",
        b"\0",
        "\u0663".encode(),
        *(bytes([0x33 | 1 << 7, i]) for i in range(3)),
    )
    for content in (b"", b"three", b"\xff3", "\u00b2".encode(), *absurd):
        (tmp_path / files.TRACKER).write_bytes(content)
        assert (
            resume_point(argparse.Namespace(load=str(tmp_path), finetune=False, ckpt_step=None))
            is None
        )
        with pytest.raises(ConfigError, match="not an iteration"):
            files.find_checkpoint(tmp_path, None)


def test_every_flipped_bit_of_a_pointer_is_a_sentence_or_another_published_checkpoint(tmp_path):
    """A pointer with one flipped bit is refused, or names an iteration that is there; it is never a
    UnicodeDecodeError and never a fresh start."""
    _publish(tmp_path, 3)
    _publish(tmp_path, 2)
    content, found = b"3\n", []
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / files.TRACKER).write_bytes(changed)
        try:
            found.append(files.find_checkpoint(tmp_path, None)[1])
        except ConfigError as error:
            assert "iteration" in str(error)
    assert set(found) <= {2, 3}


def test_a_large_file_is_hashed_to_its_end(tmp_path):
    """A file larger than one piece of 4 MiB is hashed to its end."""
    content = bytes(4 * 2**20) + b"x"
    (tmp_path / "a.bin").write_bytes(content)
    expected = {
        "blake2b": hashlib.blake2b(content, digest_size=16).hexdigest(),
        "size": len(content),
    }
    assert files.hash_files(tmp_path, ["a.bin"]) == {"a.bin": expected}


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_text("weight"), "has 6 bytes instead of 7"),
        (lambda path: path.write_text("weighty"), "has been changed"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage, words):
    """A missing file, a cut one, and one with other content of the same size are named."""
    final = _publish(tmp_path, 1)
    manifest = files.read_manifest(final)
    assert files.damaged_files(final, manifest, sorted(manifest)) == []
    assert files.files_below(final) == ["a.bin", "deep/b.bin"], "no file can hold its own hash"
    damage(final / "a.bin")
    (problem,) = files.damaged_files(final, manifest, sorted(manifest))
    assert problem.startswith(str(final / "a.bin")) and words in problem


def test_a_cut_manifest_is_an_error(tmp_path):
    """A cut manifest is an error, because nothing could be checked without it."""
    final = _publish(tmp_path, 1)
    content = (final / files.MANIFEST).read_text()
    for damaged in (content[: len(content) // 2], "", "{}"):
        (final / files.MANIFEST).write_text(damaged)
        with pytest.raises(ConfigError, match="--ckpt-step"):
            files.read_manifest(final)


def test_a_pointer_that_could_not_be_written_leaves_the_old_one(tmp_path):
    """A disk that is full in the middle of the pointer leaves the old one; 1 of 12 would be another
    checkpoint."""
    _publish(tmp_path, 3)
    with full_disk(after=1), pytest.raises(OSError):
        files.point_to(tmp_path, 12)
    assert files.find_checkpoint(tmp_path, None)[1] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", files.TRACKER]


def test_publishing_the_same_iteration_again_replaces_it_and_leaves_nothing_else(tmp_path):
    """Publishing an iteration again, as after a run that was killed, replaces it and leaves nothing
    else."""
    _publish(tmp_path, 1, "old")
    final = _publish(tmp_path, 1, "new")
    assert (final / "a.bin").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", files.TRACKER]


def test_a_crash_between_the_two_renames_loses_no_checkpoint(tmp_path):
    """An iteration that a crash during its replacement left under a temporary name is found and
    renamed back."""
    final = _publish(tmp_path, 1, "old")
    final.rename(tmp_path / ".iter_0000001.replaced")
    assert files.find_checkpoint(tmp_path, None) == (final, 1)
    assert (final / "a.bin").read_text() == "old" and not (
        tmp_path / ".iter_0000001.replaced"
    ).exists()


def test_pruning_keeps_the_newest_of_the_line_that_goes_on(tmp_path):
    """After --ckpt-step 5, pruning keeps the new iteration 6 and not the abandoned 8 and 9."""
    for iteration in (4, 5, 8, 9):
        _publish(tmp_path, iteration)
    assert files.prune(tmp_path, files.Retention(None), current=9) == []
    _publish(tmp_path, 6)
    assert files.prune(tmp_path, files.Retention(2), current=6) == [4]
    _publish(tmp_path, 7)
    assert files.prune(tmp_path, files.Retention(2), current=7) == [5]
    _publish(tmp_path, 8)
    assert files.prune(tmp_path, files.Retention(2), current=8) == [6]
    assert files.published_iterations(tmp_path) == [7, 8, 9]
    assert files.prune(tmp_path, files.Retention(1), current=7) == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
