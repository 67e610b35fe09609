"""Outlier Exposure: the maximum softmax probability of a network trained to be unsure of outliers."""

from gramwatch.methods.base import Record
from gramwatch.methods.msp import MSP


class OutlierExposureScore(MSP):
    """MSP on a network trained with auxiliary outliers (Hendrycks, Mazeika & Dietterich, 2019, section 3).

    The training is `gramwatch_lab.training.OutlierExposure`.
    """

    name = "outlier_exposure"
    record = Record(
        title="Outlier Exposure",
        paper="Hendrycks, Mazeika & Dietterich: Deep Anomaly Detection with Outlier Exposure. ICLR 2019",
        equation="-max_c softmax(z)_c, on a network trained for it",
        fitted=False,
        outliers=True,
        retraining=True,
        limits="The network has to be trained or tuned with many outliers. It is best at what is like them.",
    )
