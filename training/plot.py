"""PNG of a run's curves from its CSV logs."""

import csv
from pathlib import Path


def plot_curves(work_dir: Path) -> Path:
    """Draw ``log.csv`` and ``validation.csv`` of ``work_dir`` into ``curves.png``."""
    # The plain Agg canvas: no display, no global pyplot state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    log = _columns(work_dir / "log.csv")
    checks = _columns(work_dir / "validation.csv")
    figure = Figure(figsize=(9, 3.2), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    if log.get("minutes"):
        for name in ("l1", "ce", "confidence"):
            left.plot(log["minutes"], _smooth(log[name]), label=name, linewidth=1)
    left.set(xlabel="minutes", title="training loss (smoothed)")
    if checks.get("minutes"):
        for name, label in (("greedy_length", "greedy"), ("sampled_length", "temperature 1")):
            rows = list(zip(checks["minutes"], checks[name], checks["averaged"], strict=True))
            single = [row[:2] for row in rows if row[2] == 1]
            (line,) = right.plot(*zip(*single, strict=True), marker=".", label=label)
            mean = [row[:2] for row in rows if row[2] > 1]
            if mean:
                right.plot(
                    *zip(*mean, strict=True),
                    "*",
                    color=line.get_color(),
                    label=f"{label}, averaged",
                )
    right.set(xlabel="minutes", title="accepted length, validation (bonus token counted)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    path = work_dir / "curves.png"
    figure.savefig(path)
    return path


def _columns(path: Path) -> dict[str, list[float]]:
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {key: [float(row[key] or "nan") for row in rows] for key in (rows[0] if rows else [])}


def _smooth(values: list[float], weight: float = 0.95) -> list[float]:
    """Exponential average, with the bias of its start removed."""
    average, norm, out = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        out.append(average / norm)
    return out
