"""How good probabilities are: whether they rank outcomes, and whether they are met."""

import numpy as np
import numpy.typing as npt

NUM_BINS = 10


def auc(scores: npt.NDArray[np.floating], positive: npt.NDArray[np.bool_]) -> float:
    """Area under the ROC curve, ties counted half; NaN if only one outcome occurred."""
    wins, losses = int(positive.sum()), int((~positive).sum())
    if not wins or not losses:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # mean rank of each tie group
    return float((ranks[positive].sum() - wins * (wins + 1) / 2) / (wins * losses))


def expected_calibration_error(
    confidences: npt.NDArray[np.floating], hits: npt.NDArray[np.bool_]
) -> float:
    """Mean gap between confidence and frequency over ten equal bins; NaN without samples."""
    if not len(confidences):
        return float("nan")
    bins = np.minimum((confidences * NUM_BINS).astype(int), NUM_BINS - 1)
    gaps = np.bincount(bins, confidences - hits, minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(confidences))
