"""The files that an experiment leaves."""

from gramwatch_lab.figures.table import by_method, read_cells, read_words

LINES = """network,in_distribution,ood,method,images,tnr,tnr_published,auroc,auroc_published,note
N,CIFAR-10,iSUN,Gram,data not present,,99.0,,99.8,
N,CIFAR-10,"Tiny ImageNet, nearest",Gram,100,97.5,98.8,99.1,,
N,CIFAR-10,"Tiny ImageNet, nearest",OE,100,99.5,,99.9,,auxiliary source seen
"""
PAGE = """## N, CIFAR-10: a title

    gramwatch paper table2

N, fitted on all training images. No method saw an outlier. 2026-11-15, a CPU, gramwatch 0.1.0, PyTorch 2.

![N](n.png)
"""


def test_figures_are_read_with_their_published_ones_and_notes(tmp_path):
    path = tmp_path / "n.csv"
    path.write_text(LINES, encoding="utf-8")
    absent, gram, exposed = read_cells(path)
    assert (absent.ood, absent.ours, absent.published) == ("iSUN", {}, {"tnr": 99.0, "auroc": 99.8})
    assert (gram.ours, gram.published) == ({"tnr": 97.5, "auroc": 99.1}, {"tnr": 98.8})
    assert (exposed.method, exposed.note, gram.note) == ("OE", "auxiliary source seen", "")
    assert by_method([absent, gram, exposed], "tnr") == {
        "Gram": {"Tiny ImageNet, nearest": 97.5},
        "OE": {"Tiny ImageNet, nearest": 99.5},
    }


def test_words_are_those_of_the_page_without_date_and_machine(tmp_path):
    path = tmp_path / "n.md"
    path.write_text(PAGE, encoding="utf-8")
    words = read_words(path)
    assert words.title == "N, CIFAR-10: a title"
    assert words.seen == "No method saw an outlier."
    assert words.protocol == "N, fitted on all training images."
