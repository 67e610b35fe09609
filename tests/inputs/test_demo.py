"""scikit-learn's digits, in parts."""

from gramwatch.inputs.demo import digits


def test_the_parts_of_the_digits_are_disjoint():
    data = digits()
    parts = [
        {image.numpy().tobytes() for image in part}
        for part in (data.train, data.validation, data.test, data.held_out)
    ]
    for i, part in enumerate(parts):
        for other in parts[i + 1 :]:
            assert not part & other
    assert data.train_labels.unique().tolist() == list(range(8))
    assert len(data.train) + len(data.validation) + len(data.test) + len(data.held_out) == 1797
