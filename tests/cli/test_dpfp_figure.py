"""fwp-plot --dpfp: Figure 1 of Schlag et al. 2021."""

import numpy as np
import pytest
from mpl_toolkits.mplot3d import Axes3D

from fairseq_fwp.cli import plot


def test_each_surface_is_one_feature_in_one_quadrant(tmp_path, monkeypatch, capsys):
    surfaces = {}
    draw = Axes3D.plot_surface

    def record(axes, x, y, z, **look):
        surfaces[look["label"]] = (x, y, z)
        return draw(axes, x, y, z, **look)

    monkeypatch.setattr(Axes3D, "plot_surface", record)
    monkeypatch.chdir(tmp_path)
    plot.main(["--dpfp"])
    assert [path.name for path in tmp_path.iterdir()] == ["dpfp.png"] and capsys.readouterr().out == "wrote dpfp.png\n"
    assert (tmp_path / "dpfp.png").read_bytes().startswith(b"\x89PNG")
    assert len(surfaces) == 4
    for label, (x, y, z) in surfaces.items():
        # Eqs. 33-36: r(+-k1) r(+-k2).
        inside = (-x if "-k₁" in label else x) * (-y if "-k₂" in label else y)
        inside = np.where((x > 0) == ("-k₁" not in label), inside, 0)
        shown = np.isfinite(z)
        assert np.array_equal(shown, inside > 0) and np.allclose(z[shown], inside[shown])


@pytest.mark.parametrize("arguments", [[], ["--dpfp", "train.log"], ["--dpfp", "--train"]])
def test_logs_or_dpfp(arguments, capsys):
    with pytest.raises(SystemExit):
        plot.main(arguments)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("fwp-plot: error: ") and "logs of training" in said
