"""The table of all methods, for docs/methods/README.md."""

from gramwatch.methods import METHODS, TRAINED


def methods_table() -> str:
    """The paper's Table 1, extended: what each method needs, in Markdown."""
    rows = [
        "| method | name | training data | outliers | gradients | retraining | cost beside the pass |",
        "| --- | --- | :---: | :---: | :---: | :---: | --- |",
        "| [**Guard**](../guard.md) | `guard` | yes | no | no | no | that of Gram and a little more |",
        "| **Gram** | `gram` | yes | no | no | no | a few passes over each watched tensor |",
    ]
    for name, method in (METHODS | TRAINED).items():
        record = method.record
        outliers = ("in training" if record.retraining else "to be tuned") if record.outliers else "no"
        fitted, gradients, retraining = (
            "yes" if needed else "no" for needed in (record.fitted, record.gradients, record.retraining)
        )
        cells = (
            f"[{record.title}]({name}.md)",
            f"`{name}`",
            fitted,
            outliers,
            gradients,
            retraining,
            record.cost,
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)
