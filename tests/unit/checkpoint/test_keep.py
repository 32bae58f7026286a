import json

import pytest
import torch

from miles.checkpoint import layout
from miles.checkpoint.keep import NOTE, Keep, Note, prune, to_remove
from miles.checkpoint.load import load_checkpoint
from miles.checkpoint.save import save_checkpoint

SCORES = {1: 0.1, 2: 0.9, 3: None, 4: 0.9, 5: 0.3}
NOTES = {iteration: Note(score=score) for iteration, score in SCORES.items()}


@pytest.mark.parametrize(
    ("keep", "gone"),
    [
        (Keep(), []),
        (Keep(last=2), [1, 2, 3]),
        (Keep(best=1), [1, 2, 3]),  # of equal scores the later one; and the newest always
        (Keep(best=2), [1, 3]),
        (Keep(last=1, best=3), [1, 3]),
        (Keep(last=9), []),
    ],
)
def test_last_and_best(keep, gone):
    assert to_remove(NOTES, keep) == gone


def test_a_temporary_checkpoint_goes_once_there_is_a_newer_one():
    notes = {1: Note(temporary=True), 2: Note(), 3: Note(temporary=True)}
    assert to_remove(notes, Keep()) == [1]
    assert to_remove(notes, Keep(last=1)) == [1]
    assert to_remove({7: Note(temporary=True)}, Keep(last=1)) == []


def test_prune_keeps_what_it_cannot_judge(tmp_path):
    source, root = tmp_path / "source", tmp_path / "checkpoints"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"dtype": "float32"}))
    tensors = {"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.ones(2)}}
    for iteration in range(1, 6):
        note = Note(score=SCORES[iteration]).as_json()
        save_checkpoint(root, iteration, tensors=tensors, state={NOTE: note}, model_source=source)
    (root / "iter_0000001" / "state.json").write_text("damaged")
    layout.write_tracker(root, 4)
    assert prune(root, Keep(last=1)) == [2, 3], "1 is damaged, 4 is tracked and 5 is newer than the tracker"
    assert list(layout.checkpoints(root)) == [1, 4, 5]
    assert load_checkpoint(root).iteration == 4
