"""Draw docs/generation.svg and generation_dark.svg, the picture of README.md on a light page and on a dark one.

From results/generation.csv: `python recipes/benchmarks/front_page.py`. Text is drawn as paths, which need no font.
"""

from generation import DECAY, DELTA, IN_PLACE, MODEL, SEQUENCES, SOFTMAX, place
from record import RESULTS, Record

from fairseq_fwp.cli.plot_style import load_pyplot, save, use_log_scale

DOCS = RESULTS.parents[2] / "docs"
# Name of the file: colours of text and lines, and of each contender.
PAGES = {
    "generation": ("#1f2328", {DELTA: "#0072B2", DECAY: "#A8508A", IN_PLACE: "#007A59", SOFTMAX: "#007A59"}),
    "generation_dark": ("#e6edf3", {DELTA: "#56B4E9", DECAY: "#D998BE", IN_PLACE: "#2EC492", SOFTMAX: "#2EC492"}),
}
# The words at the end of each curve, and how far they are moved up, in points.
LABELS = {
    SOFTMAX: ("softmax, its cache\ncopied for each token:", -8),
    IN_PLACE: ("softmax, its cache\nwritten in place:", 0),
    DELTA: ("delta:", -7),
    DECAY: ("decay:", 7),
}


def draw(name, text, colours):
    record, pyplot = Record.read(RESULTS / "generation.csv"), load_pyplot()
    of_text = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with pyplot.rc_context(dict.fromkeys(of_text, text) | {"savefig.transparent": True, "font.size": 11}):
        figure, axes = pyplot.subplots(figsize=(8.6, 3.7))
        for contender, (words, up) in LABELS.items():
            curve = record.curve(place(SEQUENCES[-1]), MODEL, contender)
            colour, style = colours[contender], "--" if contender == IN_PLACE else "-"
            axes.plot(list(curve), [1000 * seconds for seconds in curve.values()], style, marker="o", color=colour)
            end = (max(curve), 1000 * curve[max(curve)])
            how = {"textcoords": "offset points", "va": "center", "color": colour, "annotation_clip": False}
            axes.annotate(f"{words} {end[1]:,.0f} ms", end, (10, up), **how)
        axes.set_xscale("log")
        axes.set_xticks(list(curve), [f"{length:,}" for length in curve])
        axes.minorticks_off()
        use_log_scale(axes.yaxis)
        axes.set_ylim(4, 2500)
        axes.set_title(f"Time of the next token of {SEQUENCES[-1]} sequences: 16 layers, D = 128, one CPU thread")
        axes.set(xlabel="tokens before it", ylabel="milliseconds")
        save(figure, DOCS / f"{name}.svg")


if __name__ == "__main__":
    for name, (text, colours) in PAGES.items():
        draw(name, text, colours)
