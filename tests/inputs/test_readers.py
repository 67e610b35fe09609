"""Images as batches."""

import os
import signal
import sys
import time
from multiprocessing import connection

import pytest
import torch
from PIL import Image

from gramwatch import DataError
from gramwatch.inputs import readers
from gramwatch.inputs.preprocessing import Preprocessing
from gramwatch.inputs.readers import Images, Tally, held_out

PREPARE = Preprocessing((8, 8), 8, "bilinear", (0.5,) * 3, (0.5,) * 3)


def test_batches_come_in_order_and_errors_stop_nothing(tmp_path):
    paths = [str(tmp_path / f"{i}.png") for i in range(7)]
    for i, path in enumerate(paths):
        Image.new("RGB", (8 + i, 8 + i), (20 * i,) * 3).save(path)
    (tmp_path / "3.png").write_bytes(b"")
    for workers in (0, 2):
        batches = list(Images(paths, PREPARE, batch_size=3, workers=workers))
        assert [[image.key for image in batch.images] for batch in batches] == [
            paths[:3],
            paths[3:6],
            paths[6:],
        ]
        assert [len(batch.inputs) for batch in batches] == [3, 2, 1]
        assert torch.allclose(batches[2].inputs, torch.tensor(120 / 127.5 - 1))
        tally = Tally()
        for batch in batches:
            tally.add(batch)
        assert (tally.read, tally.failed, tally.errors) == (6, 1, [f"{paths[3]}: the file is empty"])
        assert dict(tally.changes) == {"kept": 1, "reduced": 5}
        assert tally.usual() == "reduced"


def test_keys_are_taken_as_they_come(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield str(tmp_path / "a.png")

    batches = iter(Images(endless(), PREPARE, batch_size=4))
    assert len(next(batches).images) == 4
    assert len(taken) == 4


def test_a_batch_of_unreadable_images_has_no_inputs():
    (batch,) = Images(["missing.png"], PREPARE)
    assert batch.inputs is None
    assert [len(inputs) for inputs in Images(["missing.png"], PREPARE).inputs(Tally())] == [0]


def test_the_number_of_batches_is_known_if_that_of_images_is():
    assert len(Images(["a.png"] * 7, PREPARE, batch_size=3).inputs(Tally())) == 3
    with pytest.raises(TypeError):
        len(Images(iter(["a.png"]), PREPARE).inputs(Tally()))


def killed(key: str, grey: bool) -> None:
    os._exit(1)


def test_a_killed_worker_is_one_clear_error():
    with pytest.raises(DataError, match=r"was killed.*use fewer workers"):
        list(Images(["a.png"], PREPARE, opener=killed, workers=1))


def test_an_interrupt_while_a_tensor_is_handed_over_prints_nothing(tmp_path, monkeypatch, capfd):
    """The main process is interrupted between the connection to the worker and its answer."""
    for i in range(4):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{i}.png")
    main, answer = os.getpid(), connection.answer_challenge

    def interrupted(conn, key):
        if os.getpid() == main:
            conn.close()
            time.sleep(0.3)  # the worker notices
            raise KeyboardInterrupt
        return answer(conn, key)

    monkeypatch.setattr(connection, "answer_challenge", interrupted)
    batches = iter(Images(sorted(map(str, tmp_path.iterdir())), PREPARE, batch_size=1, workers=1))
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    del batches  # ends the worker
    assert "Traceback" not in capfd.readouterr().err


def test_workers_ignore_ctrl_c_and_print_other_exceptions(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = signal.getsignal(signal.SIGINT)
    try:
        readers._leave_interrupts_to_the_main_process(0)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        sys.excepthook(EOFError, EOFError(), None)
        sys.excepthook(ConnectionResetError, ConnectionResetError(), None)
        assert capsys.readouterr().err == ""
        sys.excepthook(ValueError, ValueError("another reason"), None)
        assert "another reason" in capsys.readouterr().err
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_is_held_out_is_drawn_by_the_seed():
    fitting, out = held_out(100, 0.2, seed=0)
    assert sorted([*fitting, *out]) == list(range(100))
    assert len(out) == 20
    assert held_out(100, 0.2, seed=0) == (fitting, out)
    assert held_out(100, 0.2, seed=1) != (fitting, out)
