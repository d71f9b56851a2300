"""A picture of DPFP: the four features of a two-dimensional vector, as four surfaces."""

from pathlib import Path

import torch

from fairseq_fwp.cli.plot_style import COLOURS, load_pyplot, save
from fairseq_fwp.modules.feature_maps import Dpfp

POINTS = 101  # along each side of the plane
PARTS = ["k₁", "k₂", "-k₁", "-k₂"]


def draw_dpfp(path: Path) -> None:
    """Draw DPFP (nu = 1) from two dimensions to four, with r(a) = max(a, 0).

    Schlag et al. 2021, arXiv 2102.11174, Figure 1: every vector has at most one feature that is not zero, so that
    vectors of different quadrants are orthogonal.
    """
    side = torch.linspace(-1, 1, POINTS)
    first, second = torch.meshgrid(side, side, indexing="ij")
    features = Dpfp(2, nu=1)(torch.stack([first, second], dim=-1))
    figure, axes = load_pyplot().subplots(figsize=(6.4, 4.8), subplot_kw={"projection": "3d"})
    look = {"shade": False, "edgecolor": "white", "linewidth": 0.3, "alpha": 0.9}
    for index, (feature, colour) in enumerate(zip(features.unbind(-1), COLOURS.values(), strict=False)):
        # Zeros are left out: the four surfaces would hide each other there.
        surface = (first, second, torch.where(feature > 0, feature, float("nan")))
        label = f"r({PARTS[index]}) r({PARTS[index - 1]})"
        axes.plot_surface(*(x.numpy() for x in surface), color=colour, label=label, **look)
    ticks = [-1, 0, 1]
    axes.set(xlabel="k₁", ylabel="k₂", zlabel="feature φ(k)", xticks=ticks, yticks=ticks, zticks=[0, 0.5, 1])
    axes.set_title("DPFP from 2 to 4 dimensions")
    axes.view_init(elev=38, azim=-72)  # no surface is seen edge-on
    figure.legend(loc="outside right upper")
    save(figure, path)
