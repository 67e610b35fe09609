"""`make stress`: its table is on the page, nothing was lost, and its checks notice a loss."""

import json
import random

import pytest

from tests import stress, stress_kills
from tests.stress_common import Row, Skipped
from tests.stress_install import counted, holes, lowest, name_of
from tests.stress_service import _mutated

RESULT = json.loads(stress.DATA.read_text(encoding="utf-8"))


def test_every_part_was_tried_and_nothing_was_lost():
    assert set(RESULT) == set(stress.PARTS)
    rows = [row for part in RESULT.values() for row in part["rows"]]
    assert [row["what"] for row in rows if row["lost"] or row["tried"] != row["survived"]] == []
    kills = [row for row in rows if row["what"].startswith("SIGKILL")]
    assert [row["tried"] for row in kills] == [stress_kills.MOMENTS] * 5
    assert max(row["tried"] for row in rows) >= 200_000


def test_a_loss_is_counted():
    row = Row("x", 5, 3, "").to_json()
    assert row["lost"] == 2
    assert stress.line(row) == "| x | 5 | 3 | 2 |  |"
    assert counted("x", "2 failed, 7 passed, 1 error in 3 s", "").lost == 3


@pytest.mark.parametrize("right", [True, False])
def test_a_wrong_result_after_a_kill_is_a_loss(right):
    def work() -> None:
        import time

        time.sleep(0.3)

    row = stress_kills.disturbed("x", work, lambda: right, 2, random.Random(0))
    assert (row.tried, row.lost) == (2, 0 if right else 2)


def test_the_oldest_dependencies_are_those_of_the_project():
    result = lowest()
    pins = {"numpy==1.24.*", "tqdm==4.66.3", "fastapi==0.115.*", "async-batcher==0.2.2", "torch==2.10.*"}
    assert pins <= set(result)
    assert len({name_of(pin) for pin in result}) == len(result) > 20


def test_a_package_that_was_not_audited_is_not_counted():
    clean, unknown = {"name": "a", "version": "1", "vulns": []}, {"name": "b", "skip_reason": "not found"}
    hole = {"name": "c", "version": "2", "vulns": [{"id": "PYSEC-1"}]}
    row = holes(json.dumps({"dependencies": [clean, unknown, hole]}))
    assert (row.tried, row.lost, row.found) == (2, 1, "pip-audit, which does not know b")
    with pytest.raises(Skipped, match="of 1 direct dependencies, because it reaches no advisories"):
        holes(json.dumps({"dependencies": [unknown]}))
    with pytest.raises(Skipped, match="no route"):
        holes("", "Traceback\nno route")


def test_mutations_change_images():
    rng = random.Random(0)
    assert sum(_mutated(rng, bytes(100)) != bytes(100) for _ in range(50)) >= 45
