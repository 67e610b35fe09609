"""The guard of `gramwatch live --demo`."""

from gramwatch.deploy.live.demo import CLASSES, OTHERS, SETS


def test_it_knows_digits_and_flags_the_rest(demo):
    examiner, shown = demo
    result = [examiner(example.data) for example in shown.examples]
    known, others = result[: len(CLASSES)], result[len(CLASSES) :]
    right = [verdict["class"] == name for verdict, name in zip(known, CLASSES, strict=True)]
    assert sum(right) >= 7
    assert sum(verdict["is_ood"] for verdict in known) <= 2
    assert len(others) == OTHERS * len(SETS)
    assert all(
        verdict["is_ood"] for verdict in others[OTHERS:]
    )  # the first are digits 8 and 9, which are near
    names = [example.name for example in shown.examples]
    assert names[:2] == ["a digit 0", "a digit 1"]
    assert names[-1] == "grey noise"
