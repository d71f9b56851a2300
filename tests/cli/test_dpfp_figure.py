"""fwp-plot --dpfp: Figure 1 of Schlag et al. 2021."""

import numpy as np
import pytest
from mpl_toolkits.mplot3d import Axes3D

from fairseq_fwp.cli import plot


def test_each_surface_is_one_feature_in_one_quadrant(tmp_path, monkeypatch):
    surfaces = {}
    draw = Axes3D.plot_surface

    def record(axes, x, y, z, **look):
        surfaces[look["label"]] = (x, y, z)
        return draw(axes, x, y, z, **look)

    monkeypatch.setattr(Axes3D, "plot_surface", record)
    plot.main(["--dpfp", "--out", str(tmp_path / "figure1.png")])
    assert (tmp_path / "figure1.png").read_bytes().startswith(b"\x89PNG")
    assert len(surfaces) == 4
    for label, (x, y, z) in surfaces.items():
        # Eqs. 33-36: r(+-k1) r(+-k2).
        inside = (-x if "-k₁" in label else x) * (-y if "-k₂" in label else y)
        inside = np.where((x > 0) == ("-k₁" not in label), inside, 0)
        shown = np.isfinite(z)
        assert np.array_equal(shown, inside > 0) and np.allclose(z[shown], inside[shown])


@pytest.mark.parametrize("arguments", [[], ["--dpfp", "train.log"]])
def test_logs_or_dpfp(arguments):
    with pytest.raises(SystemExit, match="give logs of training or --dpfp"):
        plot.main(arguments)
