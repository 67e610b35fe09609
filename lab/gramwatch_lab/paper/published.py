"""The figures that the paper publishes, to be set beside ours. All in percent.

Transcribed from the paper's tables (Sastry & Oore, "Detecting Out-of-Distribution Examples with
In-distribution Examples and Gram Matrices"), each block with the label or caption it has there, and from the
figures that its authors released. Networks have the names of `gramwatch_lab.networks`, methods the titles of
our tables: "Baseline" is MSP, "Ours" is Gram. "LSUN" and "TinyImgNet" alone are the resized sets, "(R)".

The paper contradicts itself in places: `find` gives every figure there is, each with its table.
"""

from collections.abc import Iterator
from dataclasses import dataclass

SHOWN = ("tnr", "auroc", "dtacc")
"""The metrics that the tables have: keys of `gramwatch.numerics.metrics.METRICS`."""

# in-distribution | network | out-of-distribution | TNR | AUROC | detection accuracy, each of four methods
EXPANDED_METHODS = ("MSP", "ODIN", "Mahalanobis", "Gram")
EXPANDED = """
CIFAR-10  | resnet34 | iSUN           | 44.6 73.2 97.8 99.3 | 91.0 94.0 99.5 99.8 | 85.0 86.5 96.7 98.1
CIFAR-10  | resnet34 | LSUN (R)       | 49.8 82.1 98.8 99.6 | 91.0 94.1 99.7 99.9 | 85.3 86.7 97.7 98.6
CIFAR-10  | resnet34 | LSUN (C)       | 48.6 62.0 81.3 89.8 | 91.9 91.2 96.7 97.8 | 86.3 82.4 90.5 92.6
CIFAR-10  | resnet34 | TinyImgNet (R) | 41.0 67.9 97.1 98.7 | 91.0 94.0 99.5 99.7 | 85.1 86.5 96.3 97.8
CIFAR-10  | resnet34 | TinyImgNet (C) | 46.4 68.7 92.0 96.7 | 91.4 93.1 98.6 99.2 | 85.4 85.2 93.9 96.1
CIFAR-10  | resnet34 | SVHN           | 50.5 70.3 87.8 97.6 | 89.9 96.7 99.1 99.5 | 85.1 91.1 95.8 96.7
CIFAR-10  | resnet34 | CIFAR-100      | 33.3 42.0 41.6 32.9 | 86.4 85.8 88.2 79.0 | 80.4 78.6 81.2 71.7
CIFAR-100 | resnet34 | iSUN           | 16.9 45.2 89.9 94.8 | 75.8 85.5 97.9 98.8 | 70.1 78.5 93.1 95.6
CIFAR-100 | resnet34 | LSUN (R)       | 18.8 23.2 90.9 96.6 | 75.8 85.6 98.2 99.2 | 69.9 78.3 93.5 96.7
CIFAR-100 | resnet34 | LSUN (C)       | 18.7 44.1 64.8 64.8 | 75.5 82.7 92.0 92.1 | 69.2 75.9 84.0 84.2
CIFAR-100 | resnet34 | TinyImgNet (R) | 20.4 36.1 90.9 94.8 | 77.2 87.6 98.2 98.9 | 70.8 80.1 93.3 95.0
CIFAR-100 | resnet34 | TinyImgNet (C) | 24.3 44.3 80.9 88.5 | 79.7 85.4 96.3 97.7 | 72.5 78.3 89.9 92.2
CIFAR-100 | resnet34 | SVHN           | 20.3 62.7 91.9 80.8 | 79.5 93.9 98.4 96.0 | 73.2 88.0 93.7 89.6
CIFAR-100 | resnet34 | CIFAR-10       | 19.1 18.7 20.2 12.2 | 77.1 77.2 77.5 67.9 | 71.0 71.2 72.1 63.4
CIFAR-10  | densenet | iSUN           | 62.5 93.2 95.3 99.0 | 94.7 98.7 98.9 99.8 | 89.2 94.3 95.2 97.9
CIFAR-10  | densenet | LSUN (R)       | 66.6 96.2 97.2 99.5 | 95.4 99.2 99.3 99.9 | 90.3 95.7 96.3 98.6
CIFAR-10  | densenet | LSUN (C)       | 51.8 70.6 48.2 88.4 | 92.9 93.6 80.2 97.5 | 86.9 86.4 75.6 92.0
CIFAR-10  | densenet | TinyImgNet (R) | 58.9 92.4 95.0 98.8 | 94.1 98.5 98.8 99.7 | 88.5 93.9 95.0 97.9
CIFAR-10  | densenet | TinyImgNet (C) | 56.7 87.0 84.2 96.7 | 93.8 97.6 95.3 99.3 | 88.1 92.3 89.9 96.1
CIFAR-10  | densenet | SVHN           | 40.2 86.2 90.8 96.1 | 89.9 95.5 98.1 99.1 | 83.2 91.4 93.9 95.9
CIFAR-10  | densenet | CIFAR-100      | 40.3 53.1 14.5 26.7 | 89.3 90.2 58.5 72.0 | 82.9 82.7 57.2 67.3
CIFAR-100 | densenet | iSUN           | 14.9 37.4 87.0 95.9 | 69.5 84.5 97.4 99.0 | 63.8 76.4 92.4 95.6
CIFAR-100 | densenet | LSUN (R)       | 17.6 41.2 91.4 97.2 | 70.8 85.5 98.0 99.3 | 64.9 77.1 93.9 96.4
CIFAR-100 | densenet | LSUN (C)       | 28.6 57.8 42.1 65.5 | 80.2 91.4 81.7 91.4 | 72.7 83.3 74.0 83.6
CIFAR-100 | densenet | TinyImgNet (R) | 17.6 42.6 86.6 95.7 | 71.7 85.2 97.4 99.0 | 65.7 77.0 92.2 95.5
CIFAR-100 | densenet | TinyImgNet (C) | 24.6 51.0 60.1 89.0 | 76.2 88.3 88.8 97.7 | 69.0 80.2 81.6 92.5
CIFAR-100 | densenet | SVHN           | 26.7 70.6 82.5 89.3 | 82.7 93.8 97.2 97.3 | 75.6 86.6 91.5 92.4
CIFAR-100 | densenet | CIFAR-10       | 18.9 16.8 7.7 10.6  | 75.9 74.2 60.1 64.2 | 69.7 68.6 57.8 60.4
SVHN      | densenet | iSUN           | 78.3 82.2 99.9 99.4 | 94.4 94.7 99.9 99.8 | 89.6 89.7 99.2 98.3
SVHN      | densenet | LSUN (R)       | 77.1 81.1 99.9 99.5 | 94.1 94.5 99.9 99.8 | 89.1 89.2 99.3 98.6
SVHN      | densenet | TinyImgNet (R) | 79.8 84.1 99.9 99.1 | 94.8 95.1 99.9 99.7 | 90.2 90.4 98.9 97.9
SVHN      | densenet | CIFAR-10       | 69.3 71.7 96.8 80.4 | 91.9 91.4 98.9 95.5 | 86.6 85.8 95.9 89.1
SVHN      | resnet34 | iSUN           | 77.1 79.1 99.7 99.4 | 92.2 91.4 99.8 99.8 | 89.7 89.2 98.3 98.1
SVHN      | resnet34 | LSUN (R)       | 74.3 77.3 99.9 99.6 | 91.6 89.4 99.9 99.8 | 89.0 87.2 99.5 98.5
SVHN      | resnet34 | TinyImgNet (R) | 79.0 82.0 99.9 99.3 | 93.5 92.0 99.9 99.7 | 90.4 89.4 99.1 97.9
SVHN      | resnet34 | CIFAR-10       | 78.3 79.8 98.4 85.8 | 92.9 92.1 99.3 97.3 | 90.0 89.4 96.9 92.0
"""

# The same for Gram alone, with two decimals: TNR, AUROC, detection accuracy.
RELEASED = """
CIFAR-10  | resnet34 | iSUN           | 99.26 99.83 98.08
CIFAR-10  | resnet34 | LSUN (R)       | 99.59 99.89 98.64
CIFAR-10  | resnet34 | LSUN (C)       | 89.80 97.80 92.59
CIFAR-10  | resnet34 | TinyImgNet (R) | 98.75 99.72 97.80
CIFAR-10  | resnet34 | TinyImgNet (C) | 96.67 99.24 96.07
CIFAR-10  | resnet34 | SVHN           | 97.61 99.50 96.71
CIFAR-10  | resnet34 | CIFAR-100      | 32.90 79.02 71.71
CIFAR-10  | densenet | iSUN           | 99.03 99.80 97.94
CIFAR-10  | densenet | LSUN (R)       | 99.48 99.88 98.63
CIFAR-10  | densenet | LSUN (C)       | 88.38 97.45 91.99
CIFAR-10  | densenet | TinyImgNet (R) | 98.78 99.71 97.89
CIFAR-10  | densenet | TinyImgNet (C) | 96.69 99.25 96.14
CIFAR-10  | densenet | SVHN           | 96.07 99.13 95.86
CIFAR-10  | densenet | CIFAR-100      | 26.68 72.04 67.23
CIFAR-100 | resnet34 | iSUN           | 94.76 98.81 94.98
CIFAR-100 | resnet34 | LSUN (R)       | 96.61 99.20 95.97
CIFAR-100 | resnet34 | LSUN (C)       | 64.80 92.13 84.19
CIFAR-100 | resnet34 | TinyImgNet (R) | 94.79 98.90 94.96
CIFAR-100 | resnet34 | TinyImgNet (C) | 88.48 97.66 92.17
CIFAR-100 | resnet34 | SVHN           | 80.75 96.05 89.61
CIFAR-100 | resnet34 | CIFAR-10       | 12.20 67.95 63.48
CIFAR-100 | densenet | iSUN           | 95.87 99.04 95.63
CIFAR-100 | densenet | LSUN (R)       | 97.23 99.35 96.39
CIFAR-100 | densenet | LSUN (C)       | 65.52 91.39 83.64
CIFAR-100 | densenet | TinyImgNet (R) | 95.75 98.97 95.52
CIFAR-100 | densenet | TinyImgNet (C) | 89.01 97.69 92.45
CIFAR-100 | densenet | SVHN           | 89.34 97.32 92.36
CIFAR-100 | densenet | CIFAR-10       | 10.60 64.23 60.40
SVHN      | resnet34 | iSUN           | 99.44 99.77 98.11
SVHN      | resnet34 | LSUN (R)       | 99.56 99.82 98.48
SVHN      | resnet34 | LSUN (C)       | 94.19 98.74 94.67
SVHN      | resnet34 | TinyImgNet (R) | 99.28 99.73 97.86
SVHN      | resnet34 | TinyImgNet (C) | 98.39 99.48 96.96
SVHN      | resnet34 | CIFAR-10       | 85.75 97.31 91.99
SVHN      | densenet | iSUN           | 99.35 99.80 98.33
SVHN      | densenet | LSUN (R)       | 99.50 99.84 98.58
SVHN      | densenet | LSUN (C)       | 93.33 98.59 94.33
SVHN      | densenet | TinyImgNet (R) | 99.10 99.74 97.94
SVHN      | densenet | TinyImgNet (C) | 97.88 99.46 96.80
SVHN      | densenet | CIFAR-10       | 80.41 95.53 89.05
"""

# One metric at a time: four settings of each statistic, Min/Max, Mean/Var, Min/Max (U), Mean/Var (U), where
# (U) is without normalising; diagonal, off-diagonal and complete Gram matrix.
ABLATION_METHODS = tuple(
    f"{statistic}, {bounds}{unnormalised}"
    for statistic in ("diagonal", "off-diagonal", "complete")
    for unnormalised in ("", " (U)")
    for bounds in ("Min/Max", "Mean/Var")
)
ABLATION_TNR = """
CIFAR-10  | resnet34 | iSUN           | 99.1 96.3 95.7 73.8 99.3 97.1 97.0 90.2 99.3 97.1 97.1 89.3
CIFAR-10  | resnet34 | LSUN (R)       | 99.5 98.3 97.0 77.7 99.6 98.8 98.1 93.6 99.6 98.8 98.0 94.1
CIFAR-10  | resnet34 | TinyImgNet (R) | 98.6 93.8 96.2 68.2 98.8 97.2 95.7 88.5 98.7 97.2 95.7 87.5
CIFAR-10  | resnet34 | SVHN           | 97.8 70.7 94.8 19.9 97.6 81.1 94.8 40.7 97.6 80.2 94.9 38.2
CIFAR-10  | resnet34 | CIFAR-100      | 33.3 29.4 42.5 32.9 32.9 27.2 41.8 29.3 32.8 27.4 42.2 29.2
CIFAR-100 | resnet34 | iSUN           | 93.8 71.8 50.0 33.8 95.4 85.9 67.2 55.0 95.1 85.3 65.4 52.8
CIFAR-100 | resnet34 | LSUN (R)       | 95.6 70.8 45.6 32.9 97.2 87.5 64.2 52.0 97.0 86.8 62.4 49.7
CIFAR-100 | resnet34 | TinyImgNet (R) | 94.1 68.0 51.4 34.6 95.3 84.2 68.1 52.8 95.1 83.5 66.6 50.8
CIFAR-100 | resnet34 | SVHN           | 83.1 29.8 53.2 26.0 79.1 34.4 51.8 29.6 81.4 33.9 55.6 29.2
CIFAR-100 | resnet34 | CIFAR-10       | 12.9 18.1 19.2 18.2 11.4 17.5 17.5 17.9 12.1 17.6 18.1 18.0
CIFAR-10  | densenet | iSUN           | 98.9 97.1 98.8 96.3 99.1 97.8 99.1 97.5 99.1 97.8 99.0 97.5
CIFAR-10  | densenet | LSUN (R)       | 99.4 98.8 99.4 98.4 99.5 99.2 99.5 99.0 99.5 99.1 99.4 98.9
CIFAR-10  | densenet | TinyImgNet (R) | 98.7 97.5 98.6 97.0 98.8 98.0 98.8 97.7 98.8 97.9 98.7 97.7
CIFAR-10  | densenet | SVHN           | 96.6 87.8 96.9 88.2 95.9 84.7 96.4 86.9 96.0 84.0 96.5 87.1
CIFAR-10  | densenet | CIFAR-100      | 26.4 28.9 29.0 28.2 27.0 25.2 30.1 24.8 26.8 25.5 30.1 25.1
CIFAR-100 | densenet | iSUN           | 96.0 84.2 95.5 91.9 96.1 88.8 95.5 95.7 95.9 88.5 95.3 95.8
CIFAR-100 | densenet | LSUN (R)       | 97.4 87.5 96.9 95.5 97.5 91.4 97.0 97.8 97.3 91.2 96.8 97.8
CIFAR-100 | densenet | TinyImgNet (R) | 95.8 81.4 95.4 90.2 95.9 86.9 95.3 94.2 95.8 86.4 95.2 94.3
CIFAR-100 | densenet | SVHN           | 89.4 59.7 88.8 64.5 87.3 63.2 86.4 67.4 89.4 62.9 87.9 67.3
CIFAR-100 | densenet | CIFAR-10       | 10.5 16.4 11.1 13.7 10.6 15.6 10.2 13.9 10.5 15.6 10.2 13.8
SVHN      | resnet34 | iSUN           | 99.3 99.8 98.1 96.9 99.5 99.9 97.8 98.5 99.5 99.9 97.9 98.6
SVHN      | resnet34 | LSUN (R)       | 99.6 99.9 98.5 97.4 99.6 99.9 98.3 99.0 99.6 99.9 98.4 99.0
SVHN      | resnet34 | TinyImgNet (R) | 99.0 99.6 97.8 96.5 99.3 99.6 97.8 98.1 99.3 99.6 98.4 99.0
SVHN      | resnet34 | CIFAR-10       | 82.6 93.7 86.1 86.8 85.9 94.9 86.5 90.5 85.5 94.9 86.6 90.5
SVHN      | densenet | iSUN           | 99.3 99.6 99.4 99.1 99.3 99.4 99.4 97.9 99.3 99.4 99.4 98.0
SVHN      | densenet | LSUN (R)       | 99.5 99.7 99.7 99.4 99.5 99.4 99.6 98.2 99.5 99.4 99.6 98.3
SVHN      | densenet | TinyImgNet (R) | 99.2 99.5 99.3 99.2 99.1 99.2 99.2 98.0 99.0 99.2 99.2 98.1
SVHN      | densenet | CIFAR-10       | 76.6 93.5 76.9 91.8 81.2 94.3 85.6 90.1 80.2 94.2 84.7 90.1
all       | all      | MEAN           | 95.4 86.6 87.9 77.3 95.6 90.1 90.4 83.7 95.7 89.9 90.4 83.3
all       | all      | STD-DEV        | 6.2 17.2 18.1 27.0 6.0 14.7 13.5 21.3 5.7 14.9 13.5 22.0
"""
ABLATION_AUROC = """
CIFAR-10  | resnet34 | iSUN           | 99.7 99.2 98.7 96.2 99.7 99.4 99.0 98.1 99.7 99.4 99.0 98.0
CIFAR-10  | resnet34 | LSUN (R)       | 99.8 99.5 98.7 96.7 99.8 99.7 99.1 98.5 99.8 99.7 99.1 98.4
CIFAR-10  | resnet34 | TinyImgNet (R) | 99.6 99.1 98.3 95.6 99.6 99.4 98.8 97.8 99.6 99.4 98.8 97.7
CIFAR-10  | resnet34 | SVHN           | 99.5 95.2 98.9 88.4 99.4 96.2 98.8 92.0 99.4 96.2 98.9 91.8
CIFAR-10  | resnet34 | CIFAR-100      | 79.7 78.4 84.9 83.3 78.8 75.8 84.1 79.0 79.0 76.1 84.2 79.2
CIFAR-100 | resnet34 | iSUN           | 98.7 95.5 92.1 87.8 98.9 97.4 94.5 92.7 98.8 97.3 94.2 92.3
CIFAR-100 | resnet34 | LSUN (R)       | 99.1 95.9 91.8 87.8 99.3 97.8 94.6 92.9 99.2 97.7 94.3 92.4
CIFAR-100 | resnet34 | TinyImgNet (R) | 98.8 95.1 92.5 87.1 99.0 97.2 94.8 92.5 98.9 97.1 94.6 92.1
CIFAR-100 | resnet34 | SVHN           | 96.5 84.7 92.3 80.8 95.7 86.8 91.6 83.5 96.1 86.7 92.2 83.1
CIFAR-100 | resnet34 | CIFAR-10       | 69.3 71.2 76.6 74.6 67.3 70.0 75.3 71.9 67.8 70.1 75.5 72.0
CIFAR-10  | densenet | iSUN           | 99.8 99.5 99.8 99.3 99.8 99.6 99.8 99.6 99.8 99.6 99.8 99.5
CIFAR-10  | densenet | LSUN (R)       | 99.9 99.8 99.9 99.7 99.9 99.8 99.9 99.8 99.9 99.8 99.9 99.8
CIFAR-10  | densenet | TinyImgNet (R) | 99.7 99.5 99.7 99.3 99.7 99.6 99.7 99.5 99.7 99.6 99.7 99.5
CIFAR-10  | densenet | SVHN           | 99.2 97.6 99.3 97.6 99.1 96.9 99.2 97.4 99.1 96.8 99.2 97.4
CIFAR-10  | densenet | CIFAR-100      | 68.5 75.1 68.9 74.1 72.1 72.7 73.3 72.4 72.2 72.9 73.4 72.5
CIFAR-100 | densenet | iSUN           | 99.1 97.2 98.9 98.2 99.0 97.9 98.9 99.0 99.1 97.8 98.9 99.0
CIFAR-100 | densenet | LSUN (R)       | 99.4 97.8 99.3 99.0 99.4 98.3 99.3 99.4 99.4 98.3 99.3 99.4
CIFAR-100 | densenet | TinyImgNet (R) | 99.0 96.6 98.9 97.8 99.0 97.5 98.9 98.7 99.0 97.4 98.9 98.7
CIFAR-100 | densenet | SVHN           | 97.4 92.5 97.3 92.6 97.0 92.7 96.9 93.4 97.4 92.7 97.1 93.4
CIFAR-100 | densenet | CIFAR-10       | 64.4 70.1 65.0 66.7 63.7 68.3 64.2 66.2 64.2 68.7 64.6 66.2
SVHN      | resnet34 | iSUN           | 99.8 99.9 98.8 98.3 99.8 99.9 99.0 99.0 99.8 99.9 99.0 99.0
SVHN      | resnet34 | LSUN (R)       | 99.9 99.9 98.9 98.4 99.8 99.9 99.1 99.1 99.8 99.9 99.1 99.1
SVHN      | resnet34 | TinyImgNet (R) | 99.7 99.8 98.8 98.3 99.7 99.8 99.0 99.0 99.7 99.8 99.0 99.0
SVHN      | resnet34 | CIFAR-10       | 96.8 98.6 97.1 97.3 97.3 98.8 97.3 97.8 97.3 98.8 97.3 97.8
SVHN      | densenet | iSUN           | 99.8 99.9 99.9 99.8 99.8 99.9 99.8 99.5 99.8 99.9 99.8 99.5
SVHN      | densenet | LSUN (R)       | 99.9 99.9 99.9 99.9 99.8 99.9 99.9 99.6 99.8 99.9 99.9 99.6
SVHN      | densenet | TinyImgNet (R) | 99.7 99.9 99.8 99.8 99.7 99.8 99.8 99.6 99.7 99.8 99.8 99.6
SVHN      | densenet | CIFAR-10       | 94.5 98.5 94.9 98.1 95.6 98.6 96.5 97.6 95.5 98.6 96.4 97.7
all       | all      | MEAN           | 99.0 97.5 97.7 95.6 99.0 98.0 98.1 96.9 99.0 98.0 98.1 96.8
all       | all      | STD-DEV        | 1.3 3.4 2.7 5.2 1.3 2.9 2.2 3.9 1.2 2.9 2.2 4.0
"""
ABLATION_DTACC = """
CIFAR-10  | resnet34 | iSUN           | 97.9 95.7 95.5 92.1 98.0 96.2 96.0 93.5 98.1 96.2 96.0 93.4
CIFAR-10  | resnet34 | LSUN (R)       | 98.5 97.0 96.0 93.0 98.6 97.6 96.6 94.6 98.6 97.6 96.6 94.5
CIFAR-10  | resnet34 | TinyImgNet (R) | 97.5 95.6 94.7 91.2 97.7 96.3 95.3 93.1 97.8 96.4 95.4 92.9
CIFAR-10  | resnet34 | SVHN           | 97.0 90.1 95.0 84.7 96.6 90.9 94.9 87.0 96.7 90.8 95.1 86.7
CIFAR-10  | resnet34 | CIFAR-100      | 72.4 71.7 78.2 76.8 71.5 69.1 77.4 72.1 71.7 69.4 77.4 72.2
CIFAR-100 | resnet34 | iSUN           | 94.5 89.3 85.4 81.1 95.3 92.2 87.9 86.1 95.1 92.0 87.6 85.6
CIFAR-100 | resnet34 | LSUN (R)       | 95.4 90.1 85.7 81.4 96.3 93.1 88.4 86.6 96.1 93.0 88.1 86.1
CIFAR-100 | resnet34 | TinyImgNet (R) | 94.6 88.5 85.9 80.1 95.2 91.8 88.4 85.9 95.1 91.6 88.2 85.4
CIFAR-100 | resnet34 | SVHN           | 90.2 77.5 85.1 73.6 89.2 80.3 84.3 75.3 89.7 80.3 84.8 74.9
CIFAR-100 | resnet34 | CIFAR-10       | 64.6 66.0 71.1 69.1 63.0 64.8 69.8 66.5 63.3 65.0 70.1 66.6
CIFAR-10  | densenet | iSUN           | 97.8 96.5 97.8 95.9 97.9 96.9 97.8 96.8 98.0 96.8 97.8 96.7
CIFAR-10  | densenet | LSUN (R)       | 98.7 98.0 98.6 97.4 98.6 98.2 98.5 98.1 98.7 98.1 98.5 98.1
CIFAR-10  | densenet | TinyImgNet (R) | 97.9 96.8 97.8 96.3 97.8 97.1 97.7 97.0 97.9 97.0 97.7 97.0
CIFAR-10  | densenet | SVHN           | 96.3 92.3 96.5 92.3 95.8 91.1 96.0 92.0 95.8 90.9 96.1 92.0
CIFAR-10  | densenet | CIFAR-100      | 66.5 68.8 66.6 67.8 67.6 67.2 68.9 66.6 67.3 67.3 68.6 66.6
CIFAR-100 | densenet | iSUN           | 95.7 91.4 95.4 93.6 95.7 92.6 95.3 95.5 95.7 92.6 95.3 95.5
CIFAR-100 | densenet | LSUN (R)       | 96.4 92.7 96.1 95.3 96.5 93.7 96.2 96.7 96.4 93.7 96.2 96.7
CIFAR-100 | densenet | TinyImgNet (R) | 95.5 90.4 95.2 92.9 95.5 91.8 95.2 94.7 95.6 91.7 95.2 94.7
CIFAR-100 | densenet | SVHN           | 92.4 85.7 92.0 86.0 91.7 86.0 91.4 87.1 92.4 86.2 91.9 87.1
CIFAR-100 | densenet | CIFAR-10       | 60.6 64.9 61.3 62.2 59.7 63.4 60.5 61.6 60.4 63.8 61.0 61.5
SVHN      | resnet34 | iSUN           | 98.0 98.4 96.6 96.3 98.1 98.5 96.4 96.8 98.1 98.5 96.5 96.8
SVHN      | resnet34 | LSUN (R)       | 98.5 98.9 96.8 96.5 98.5 98.9 96.7 97.0 98.5 98.9 96.7 97.0
SVHN      | resnet34 | TinyImgNet (R) | 97.6 98.1 96.4 96.2 97.9 98.2 96.4 96.6 97.9 98.2 96.5 96.6
SVHN      | resnet34 | CIFAR-10       | 91.1 94.9 92.5 94.0 92.0 95.2 92.8 94.3 92.0 95.2 92.8 94.2
SVHN      | densenet | iSUN           | 98.3 98.8 98.4 98.3 98.4 98.5 98.4 97.3 98.3 98.6 98.4 97.3
SVHN      | densenet | LSUN (R)       | 98.6 98.9 98.7 98.5 98.6 98.6 98.7 97.6 98.5 98.7 98.7 97.7
SVHN      | densenet | TinyImgNet (R) | 97.9 98.5 98.1 98.2 98.0 98.3 98.1 97.3 97.9 98.3 98.1 97.3
SVHN      | densenet | CIFAR-10       | 88.1 94.3 88.6 93.5 89.2 94.7 90.7 92.6 89.0 94.7 90.6 92.6
all       | all      | MEAN           | 96.0 93.7 94.1 91.6 96.1 94.4 94.5 92.9 96.2 94.4 94.5 92.8
all       | all      | STD-DEV        | 2.9 5.2 4.5 6.8 2.8 4.5 3.9 5.6 2.8 4.5 3.9 5.7
"""

# "Combining OE + Ours", a network trained with OE: TNR, AUROC, detection accuracy of each of three scores.
JOINED_METHODS = ("MSP", "Gram", "Gram less MSP")
JOINED = """
CIFAR-10  | iSUN           | 98.3 99.3 96.9 | 98.9 99.8 97.8 | 99.8 99.9 99.0
CIFAR-10  | LSUN (R)       | 98.5 99.4 97.0 | 99.4 99.9 98.4 | 99.8 99.9 99.1
CIFAR-10  | LSUN (C)       | 98.0 99.4 96.9 | 89.5 97.8 92.5 | 98.6 99.6 97.3
CIFAR-10  | TinyImgNet (R) | 93.9 98.5 94.6 | 98.5 99.7 97.6 | 99.5 99.9 98.5
CIFAR-10  | TinyImgNet (C) | 95.2 98.7 95.2 | 95.9 99.1 95.7 | 99.1 99.8 97.8
CIFAR-10  | SVHN           | 98.0 99.5 96.9 | 97.6 99.4 96.8 | 99.3 99.8 98.2
CIFAR-10  | CIFAR-100      | 73.9 94.8 87.9 | 38.9 80.1 73.3 | 72.9 93.9 87.0
CIFAR-100 | iSUN           | 50.9 89.8 82.3 | 96.3 99.1 95.9 | 95.6 98.9 96.0
CIFAR-100 | LSUN (R)       | 58.3 92.0 84.7 | 98.4 99.6 97.3 | 97.4 99.3 97.4
CIFAR-100 | LSUN (C)       | 69.5 94.0 86.6 | 69.7 92.6 85.3 | 83.1 96.3 89.7
CIFAR-100 | TinyImgNet (R) | 36.1 85.1 77.5 | 96.3 99.1 95.9 | 92.8 98.2 94.6
CIFAR-100 | TinyImgNet (C) | 41.6 86.3 78.6 | 90.1 97.7 92.8 | 87.1 96.9 91.1
CIFAR-100 | SVHN           | 56.2 92.5 85.6 | 84.8 96.5 90.8 | 85.6 96.8 90.4
CIFAR-100 | CIFAR-10       | 17.4 78.4 71.7 | 7.5 59.3 57.3  | 16.5 77.7 71.6
"""

# "Preliminary experiments on combining OE with our method": the same, of a network trained without OE ...
PRELIMINARY_METHODS = ("MSP", "Gram", "Gram over MSP")
PRELIMINARY_BASELINE = """
CIFAR-10  | iSUN           | 43.6 89.9 83.3 | 98.7 99.7 97.5 | 98.8 99.7 97.6
CIFAR-10  | LSUN (R)       | 47.8 91.5 85.0 | 99.3 99.8 98.3 | 99.3 99.8 98.4
CIFAR-10  | TinyImgNet (R) | 39.1 88.2 81.6 | 98.1 99.6 97.3 | 98.3 99.6 97.4
CIFAR-10  | SVHN           | 51.6 91.9 85.1 | 97.1 99.3 96.4 | 97.4 99.3 96.6
CIFAR-10  | CIFAR-100      | 37.0 87.8 81.5 | 25.7 74.7 68.6 | 28.3 75.6 69.2
CIFAR-100 | iSUN           | 18.4 78.1 71.6 | 96.2 99.1 95.9 | 96.2 99.0 95.8
CIFAR-100 | LSUN (R)       | 20.2 79.2 72.5 | 97.8 99.4 96.9 | 97.8 99.4 96.8
CIFAR-100 | TinyImgNet (R) | 20.4 78.7 71.8 | 96.0 99.0 95.7 | 96.1 99.0 95.7
CIFAR-100 | SVHN           | 14.8 70.9 64.8 | 85.6 96.8 91.3 | 84.9 96.7 91.2
CIFAR-100 | CIFAR-10       | 16.4 74.0 67.8 | 6.0 58.3 56.3  | 8.9 62.8 59.6
"""
# ... and of one trained with it.
PRELIMINARY_OE = """
CIFAR-10  | iSUN           | 98.3 99.3 96.9 | 98.9 99.8 97.8 | 99.8 100.0 99.1
CIFAR-10  | LSUN (R)       | 98.5 99.4 97.0 | 99.4 99.9 98.4 | 99.9 100.0 99.3
CIFAR-10  | TinyImgNet (R) | 93.9 98.5 94.5 | 98.5 99.7 97.6 | 99.5 99.9 98.8
CIFAR-10  | SVHN           | 98.0 99.5 96.8 | 97.6 99.5 96.8 | 99.1 99.8 98.4
CIFAR-10  | CIFAR-100      | 73.9 94.8 87.8 | 37.8 80.0 73.2 | 58.5 85.1 78.4
CIFAR-100 | iSUN           | 50.9 89.8 82.3 | 96.3 99.1 95.9 | 96.8 99.3 96.1
CIFAR-100 | LSUN (R)       | 58.3 92.0 84.6 | 98.4 99.6 97.2 | 98.3 99.6 97.2
CIFAR-100 | TinyImgNet (R) | 36.1 85.1 77.5 | 96.2 99.1 95.8 | 95.5 99.0 95.3
CIFAR-100 | SVHN           | 56.2 92.5 85.5 | 84.5 96.4 90.7 | 87.9 97.6 92.2
CIFAR-100 | CIFAR-10       | 17.4 78.4 71.7 | 7.4 59.1 57.1  | 13.8 69.4 64.9
"""

# tab:OE and appendix:OE, TNR alone: MSP on OE's plain network, on its network trained with OE, MSP on our
# networks, Gram on them (each the mean over ResNet-34 and DenseNet). "mean" is over the sets of tab:OE.
EXPOSURE_METHODS = ("MSP on OE's plain network", "OE", "MSP", "Gram")
EXPOSURE = """
CIFAR-10  | mean       | 65.1 90.5 51.7625 98.7
CIFAR-100 | mean       | 37.3 61.5 19.15 93.4
SVHN      | mean       | 93.7 99.9 76.65 95.2
CIFAR-10  | Gaussian   | 85.6 99.3 43.5 100
CIFAR-10  | Rademacher | 52.4 99.5 48.3 100
CIFAR-10  | Blob       | 83.8 99.4 52.9 99.8
CIFAR-10  | Texture    | 57.2 87.8 37.0 85.3
CIFAR-10  | SVHN       | 71.2 95.2 45.4 96.1
CIFAR-10  | LSUN (R)   | 61.3 87.9 58.2 99.5
CIFAR-100 | Gaussian   | 45.7 87.9 18.2 100
CIFAR-100 | Rademacher | 61.0 82.9 15.6 100
CIFAR-100 | Blob       | 62.0 87.9 38.4 98.6
CIFAR-100 | Texture    | 28.5 45.6 19.9 68.5
CIFAR-100 | SVHN       | 30.7 57.1 23.5 85.4
CIFAR-100 | LSUN (R)   | 26.0 42.5 18.2 97.2
SVHN      | Gaussian   | 94.6 100 87.65 100
SVHN      | Bernoulli  | 95.6 100 92.25 100
SVHN      | Blob       | 96.3 100 93.35 100
SVHN      | Texture    | 92.8 99.8 72.6 94.9
SVHN      | CIFAR-10   | 94.0 99.9 73.8 83.0
SVHN      | LSUN (R)   | 93.6 99.9 75.7 99.5
"""

# appendix:dpn+, ResNet-34: TNR, AUROC, detection accuracy. On CIFAR-10 DPN, on CIFAR-100 Semantic.
TRAINED = """
CIFAR-10  | LSUN (R)       | DPN         | 42.60 90.20 79.50
CIFAR-10  | LSUN (R)       | VD          | 92.30 98.30 94.10
CIFAR-10  | LSUN (R)       | MSP         | 49.80 91.00 85.30
CIFAR-10  | LSUN (R)       | ODIN        | 82.10 94.10 86.70
CIFAR-10  | LSUN (R)       | Mahalanobis | 98.80 99.70 97.70
CIFAR-10  | LSUN (R)       | Gram        | 99.85 99.89 98.66
CIFAR-10  | TinyImgNet (R) | DPN         | 71.60 93.00 86.40
CIFAR-10  | TinyImgNet (R) | VD          | 82.90 96.80 91.30
CIFAR-10  | TinyImgNet (R) | MSP         | 41.00 91.00 85.10
CIFAR-10  | TinyImgNet (R) | ODIN        | 67.90 94.00 86.50
CIFAR-10  | TinyImgNet (R) | Mahalanobis | 97.10 99.50 96.30
CIFAR-10  | TinyImgNet (R) | Gram        | 99.48 99.72 97.82
CIFAR-10  | SVHN           | DPN         | 79.90 95.90 87.30
CIFAR-10  | SVHN           | VD          | 71.30 93.20 86.40
CIFAR-10  | SVHN           | MSP         | 50.50 89.90 85.10
CIFAR-10  | SVHN           | ODIN        | 70.30 96.70 91.10
CIFAR-10  | SVHN           | Mahalanobis | 87.80 99.10 95.80
CIFAR-10  | SVHN           | Gram        | 98.14 99.50 96.71
CIFAR-100 | iSUN           | Semantic    | 41.60 85.20 88.40
CIFAR-100 | iSUN           | VD          | 80.20 94.20 87.80
CIFAR-100 | iSUN           | MSP         | 16.89 75.80 70.11
CIFAR-100 | iSUN           | ODIN        | 45.21 85.48 78.47
CIFAR-100 | iSUN           | Mahalanobis | 89.91 97.91 93.05
CIFAR-100 | iSUN           | Gram        | 95.12 98.9 95.18
CIFAR-100 | LSUN (R)       | Semantic    | 20.50 79.00 57.80
CIFAR-100 | LSUN (R)       | VD          | 85.50 95.90 90.40
CIFAR-100 | LSUN (R)       | MSP         | 18.80 75.80 69.90
CIFAR-100 | LSUN (R)       | ODIN        | 23.20 85.60 78.30
CIFAR-100 | LSUN (R)       | Mahalanobis | 90.89 98.2 93.5
CIFAR-100 | LSUN (R)       | Gram        | 97.14 99.28 96.19
CIFAR-100 | TinyImgNet (R) | Semantic    | 37.60 83.10 75.60
CIFAR-100 | TinyImgNet (R) | VD          | 83.70 95.30 89.70
CIFAR-100 | TinyImgNet (R) | MSP         | 20.40 77.20 70.80
CIFAR-100 | TinyImgNet (R) | ODIN        | 36.1 87.6 80.1
CIFAR-100 | TinyImgNet (R) | Mahalanobis | 90.92 98.20 93.30
CIFAR-100 | TinyImgNet (R) | Gram        | 95.12 98.97 95.13
"""

# fig:mnist_ood, networks trained on MNIST: TNR, AUROC, detection accuracy.
MLP = """
mlp_300        | KMNIST        | MSP  | 47.66 73.96 73.91
mlp_300        | KMNIST        | Gram | 98.57 99.66 97.37
mlp_300        | Fashion-MNIST | MSP  | 44.93 66.93 71.07
mlp_300        | Fashion-MNIST | Gram | 93.51 98.64 94.36
mlp_300_150    | KMNIST        | MSP  | 59.79 75.17 79.49
mlp_300_150    | KMNIST        | Gram | 97.8 99.4 96.55
mlp_300_150    | Fashion-MNIST | MSP  | 70.73 77.10 83.00
mlp_300_150    | Fashion-MNIST | Gram | 95.2 99.00 95.17
mlp_300_150_50 | KMNIST        | MSP  | 70.4 79.75 83.38
mlp_300_150_50 | KMNIST        | Gram | 97.5 99.11 96.4
mlp_300_150_50 | Fashion-MNIST | MSP  | 73.92 76.54 84.67
mlp_300_150_50 | Fashion-MNIST | Gram | 95.7 98.94 95.48
"""

# fig:ood_layerwise and fig:ood_orders, TNR on TinyImgNet (R): one stage or dense block, one order at a time.
DEPTH = """
CIFAR-10  | resnet34 | TinyImgNet (R) | 99.699 96.151 70.018 71.364
CIFAR-100 | densenet | TinyImgNet (R) | 97.432 80.057 56.930
"""
ORDER = """
CIFAR-10  | resnet34 | TinyImgNet (R) | 94.696 97.949 99.403 99.501 99.309 99.602 99.373 99.616 99.322 99.593
CIFAR-100 | densenet | TinyImgNet (R) | 82.990 89.856 92.643 95.68 94.457 96.7 94.551 96.686 94.294 96.616
"""
# The dashed lines of both.
LINES = """
CIFAR-10  | resnet34 | TinyImgNet (R) | 41 67.9 97.1 99.48
CIFAR-100 | densenet | TinyImgNet (R) | 17.6 42.6 86.6 96.08
"""


@dataclass(frozen=True)
class Entry:
    """What one table says of one method on one pair of sets."""

    table: str
    """The table's label, or its caption in short."""
    in_distribution: str
    network: str
    ood: str
    method: str
    figures: dict[str, float]
    """In percent, by metric."""
    trained: str = "cross_entropy"
    """The objective of the network that was judged."""


def entries() -> Iterator[Entry]:
    """Every published figure of a method; what is most exact or most often quoted comes first."""
    for data, network, ood, *by_metric in _rows(EXPANDED):
        yield from _across("tab:exp_ood_results", data, network, ood, EXPANDED_METHODS, by_metric)
    for data, network, ood, figures in _rows(RELEASED):
        yield Entry("released figures", data, network, ood, "Gram", _figures(figures))
    metrics = [list(_rows(block)) for block in (ABLATION_TNR, ABLATION_AUROC, ABLATION_DTACC)]
    for (data, network, ood, tnr), (*_, auroc), (*_, dtacc) in zip(*metrics, strict=True):
        yield from _across("tab:detailed_ablation", data, network, ood, ABLATION_METHODS, [tnr, auroc, dtacc])
    for table, block, trained in (
        ("combining OE + ours", JOINED, "outlier_exposure"),
        ("preliminary", PRELIMINARY_BASELINE, "cross_entropy"),
        ("preliminary", PRELIMINARY_OE, "outlier_exposure"),
    ):
        for data, ood, *by_method in _rows(block):
            methods = PRELIMINARY_METHODS if table == "preliminary" else JOINED_METHODS
            for method, figures in zip(methods, by_method, strict=True):
                yield Entry(table, data, "wrn40_2", ood, method, _figures(figures), trained)
    for data, ood, figures in _rows(EXPOSURE):
        table = "tab:OE" if ood == "mean" else "appendix:OE"
        yield from _across(table, data, "resnet34 and densenet", ood, EXPOSURE_METHODS, [figures])
    for data, ood, method, figures in _rows(TRAINED):
        yield Entry("appendix:dpn+", data, "resnet34", ood, method, _figures(figures))
    for network, ood, method, figures in _rows(MLP):
        yield Entry("fig:mnist_ood", "MNIST", network, ood, method, _figures(figures))
    for data, network, ood, figures in _rows(LINES):
        yield from _across("fig:ood_layerwise", data, network, ood, EXPANDED_METHODS, [figures])


def find(
    in_distribution: str,
    network: str,
    ood: str,
    method: str,
    tables: tuple[str, ...] | None = None,
    trained: str = "cross_entropy",
) -> list[Entry]:
    """What the tables, or some of them, say of one method on one pair of sets; nothing, if none does."""
    sought = (in_distribution, network, ood, method, trained)
    return [
        entry
        for entry in entries()
        if (entry.in_distribution, entry.network, entry.ood, entry.method, entry.trained) == sought
        and (tables is None or entry.table in tables)
    ]


def series(block: str, in_distribution: str, network: str) -> dict[str, list[float]]:
    """The curves of a figure (`DEPTH` or `ORDER`), by out-of-distribution set."""
    return {
        ood: [float(value) for value in values.split()]
        for data, name, ood, values in _rows(block)
        if (data, name) == (in_distribution, network)
    }


def _rows(block: str) -> Iterator[list[str]]:
    for line in block.strip().splitlines():
        yield [cell.strip() for cell in line.split("|")]


def _figures(text: str) -> dict[str, float]:
    return dict(zip(SHOWN, map(float, text.split()), strict=True))


def _across(
    table: str, data: str, network: str, ood: str, methods: tuple[str, ...], by_metric: list[str]
) -> Iterator[Entry]:
    """The entries of a line that has, for each metric, one figure of each method."""
    columns = zip(*(map(float, figures.split()) for figures in by_metric), strict=True)
    for method, figures in zip(methods, columns, strict=True):
        # A table with one metric has the TNR.
        yield Entry(table, data, network, ood, method, dict(zip(SHOWN, figures, strict=False)))
