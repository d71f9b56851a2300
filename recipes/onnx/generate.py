"""Write text with a model that `fwp-export` has written, without PyTorch and fairseq: numpy and onnxruntime only.

    python generate.py FOLDER "the memory" [--tokens 40] [--beam 5 | --sample 40] [--temperature 0.8] [--seed 1]
    python generate.py FOLDER --lines FILE --beam 5  # translate or continue each line
    python generate.py FOLDER --measure     # time of a token and memory after 256 to 16,384 tokens
    python generate.py FOLDER --score FILE  # perplexity of a text, a sentence a line

Words are those of the training text, separated by white space. If the folder has BPE codes, they are split into its
parts, as subword-nmt does: its words are separated by blanks only.
A translation model translates the text; a language model continues it.
"""

import argparse
import json
import math
import re
import resource
import sys
import time
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import onnxruntime

END = "</w>"  # of a word, in the codes


class Model:
    """A graph with its dictionary. A state is a list of arrays; the first dimension of each is the row.

    In translation it begins with the memory of the source, which a second graph makes and the first does not change.
    """

    def __init__(self, folder, threads=1):
        check_files(folder, "model.json", "model.onnx", "dict.txt")
        self.about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        self.eos, self.pad, self.unk = (self.about[name] for name in ("eos", "pad", "unk"))
        # What the model reads before a text, and whether each line of a text is read by itself.
        self.before, self.by_lines = self.about.get("begin", [self.eos]), self.about.get("lines", False)
        self.memory = self.about.get("memory", [])
        check_files(folder, *(["source.onnx", "source.txt"] if self.memory else []))
        self.words = read_words(folder / "dict.txt")
        self.given = read_words(folder / "source.txt") if self.memory else self.words
        self.numbers = {word: number for number, word in enumerate(self.given)}
        codes = folder / "codes"
        self.ranks, self.end_apart = read_codes(codes) if codes.is_file() else (None, False)
        self.session = open_graph(folder / "model.onnx", threads)
        self.source = open_graph(folder / "source.onnx", threads) if self.memory else None

    def start(self, rows=1):
        """Return the state before the first token, without a source."""
        return [np.zeros((rows, *part["start"][1:]), part["dtype"]) for part in self.about["state"]]

    def begin(self, text):
        """Return the tokens (1, L) that the model reads first, and the state before them."""
        tokens = self.encode(text)
        if not self.memory:
            return tokens, self.start()
        # fairseq's encoder reads the end of a line last, its decoder first.
        return tokens[:, :1], [*self.source.run(None, {"tokens": np.roll(tokens, -1, 1)}), *self.start()]

    def read(self, tokens, state):
        """Read tokens (B, L); return the log-probabilities (B, L, V) of what follows each, and the new state."""
        found, parts = [], [*self.memory, *self.about["state"]]
        for part, x in zip(parts, state, strict=True):
            expected = [len(tokens), *part["start"][1:]]
            sizes = [size for n, size in enumerate(x.shape) if n != part["grows"]]
            if len(x.shape) != len(expected) or sizes != [s for n, s in enumerate(expected) if n != part["grows"]]:
                raise ValueError(f"{part['name']} of the state must have the shape {expected}, got {list(x.shape)}")
        most = self.about.get("most_tokens")  # with learned positions, of which the state has the next
        if most is not None and (read := int(state[-1].max()) + tokens.shape[1]) > most:
            remedy = "give a shorter one, or fewer new tokens with --tokens"
            raise ValueError(f"a text must have at most {most} tokens, the learned positions, got {read}: {remedy}")
        for first in range(0, tokens.shape[1], self.about["tokens_per_call"]):
            piece = tokens[:, first : first + self.about["tokens_per_call"]]
            given = {part["name"]: x for part, x in zip(parts, state, strict=True)}
            log_probs, *after = self.session.run(None, {"tokens": piece, **given})
            found.append(log_probs)
            state = [*state[: len(self.memory)], *after]
        return np.concatenate(found, 1), state

    def encode(self, text):
        """Return the tokens (1, L) of a text, after what the model reads before it: the end of a line, <s> or nothing.

        Raises ValueError without a token, and as `number`.
        """
        if not (tokens := [*self.before, *self.number(text)]):
            raise ValueError(f"a text must have a word, with which the model begins, got {text[:60]!r}")
        return np.array([tokens], np.int64)

    def number(self, text):
        """Return the numbers of the words of a text. Raises ValueError if a word is padding."""
        if self.ranks:  # before fairseq separates words at any white space
            text = " ".join(self.split(word) for word in re.split("[\r\n ]+", text) if word)
        tokens = [self.numbers.get(word, self.unk) for word in text.split()]
        if self.pad in tokens:
            raise ValueError(f"words of a text must not be {self.given[self.pad]}, which is padding, got {text[:60]!r}")
        return tokens

    def split(self, word):
        """Return the parts of a word by byte pair encoding, as subword-nmt: merge the pair that was learned first."""
        parts = [*word, END] if self.end_apart else [*word[:-1], word[-1] + END]
        while len(parts) > 1:
            rank, pair = min((self.ranks.get(pair, math.inf), pair) for pair in pairwise(parts))
            if rank == math.inf:
                break
            merged = []
            for part in parts:
                if (merged[-1:], part) == ([pair[0]], pair[1]):
                    merged[-1] += part
                else:
                    merged.append(part)
            parts = merged
        return "@@ ".join(parts).removesuffix(END).removesuffix("@@ ")

    def decode(self, tokens):
        return (" ".join(self.words[token] for token in tokens) + " ").replace("@@ ", "").rstrip()


def check_files(folder, *names):
    """End the program if the folder lacks one of these files."""
    if missing := [name for name in names if not (folder / name).is_file()]:
        sys.exit(f"generate.py: the folder must be one of fwp-export, got {folder} without {', '.join(missing)}")


def read_lines(path):
    """Return the lines of a text as fairseq and subword-nmt do: other characters than line ends do not end a line."""
    with path.open(encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]


def read_words(path):
    """Return the words of fairseq's dictionary: four symbols, then those of the file, the last of equal ones counts."""
    lines = (line.rstrip().removesuffix(" #fairseq:overwrite") for line in read_lines(path))
    return ["<s>", "<pad>", "</s>", "<unk>", *(line.rsplit(" ", 1)[0] for line in lines)]


def read_codes(path):
    """Return the rank of each pair of subword-nmt's codes, and whether the end of a word is a symbol apart.

    It is one in version 0.1, which has no header. Ends the program for other codes.
    """
    lines, version = path.read_text(encoding="utf-8").rstrip("\n").split("\n"), "0.1"
    if lines[0].startswith("#version:"):
        version = lines.pop(0).split()[-1]
    if version not in ("0.1", "0.2"):
        sys.exit(f"generate.py: {path} must have codes of subword-nmt's version 0.1 or 0.2, got {version}")
    pairs = [tuple(line.strip("\r\n ").split(" ")) for line in lines]
    if wrong := [pair for pair in pairs if len(pair) != 2]:
        sys.exit(f"generate.py: {path} must have two parts in each line, got {' '.join(wrong[0])!r}")
    ranks = {pair: rank for rank, pair in reversed([*enumerate(pairs)])}  # of equal ones the first counts
    return ranks, version == "0.1"


def open_graph(path, threads):
    """Return a session of ONNX Runtime. Ends the program if it cannot read the file."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # its error is shown below
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of another opset, or damaged; ONNX Runtime has a class of its own for each
        said = " ".join(str(error).split())[:200]
        sys.exit(f"generate.py: {path} must be a graph that onnxruntime {onnxruntime.__version__} can read: {said}")


def sample(model, tokens, state, length, top, temperature, seed):
    """Yield tokens, each drawn from the `top` most probable; top = 1: the most probable."""
    draw = np.random.default_rng(seed)
    log_probs, state = model.read(tokens, state)
    for _ in range(length):
        scores = log_probs[0, -1].astype(np.float64) / temperature
        scores[model.pad] = -np.inf
        best = np.argsort(-scores, kind="stable")[:top]
        chances = np.exp(scores[best] - scores[best[0]])
        token = int(draw.choice(best, p=chances / chances.sum()))
        if token == model.eos:
            return
        yield token
        log_probs, state = model.read(np.array([[token]]), state)


def beam_search(model, tokens, state, length, size):
    """Return the `size` best endings of at most `length` tokens, as (score a token, tokens), as fairseq finds them.

    The score counts the given tokens, too.
    """
    log_probs, state = model.read(tokens, state)
    given, past = tokens.shape[1] - 1, np.take_along_axis(log_probs[0, :-1], tokens[0, 1:, None], 1).sum()
    log_probs, state = np.repeat(log_probs[:, -1], size, 0), [np.repeat(x, size, 0) for x in state]
    rows, sums, done = [[] for _ in range(size)], np.array([past] + [-np.inf] * (size - 1)), []
    for step in range(length + 1):
        scores = sums[:, None] + log_probs
        scores[:, model.pad] = -np.inf
        if given + step == 0 and model.before:  # fairseq's --min-len of 1
            scores[:, model.eos] = -np.inf
        if step == length:
            scores[:, : model.eos] = scores[:, model.eos + 1 :] = -np.inf
        flat = scores.ravel()
        best = np.argsort(-flat, kind="stable")[: 2 * size]
        kept = []
        for rank, place in enumerate(best):
            row, token = divmod(int(place), scores.shape[1])
            if token != model.eos:
                kept.append((row, token, flat[place]))
            elif rank < size and np.isfinite(flat[place]) and len(done) < size:
                done.append((flat[place] / (given + step + 1), rows[row]))
        if len(done) == size or step == length:
            break
        kept = kept[:size]
        order = np.array([row for row, _, _ in kept])
        rows, sums = [[*rows[row], token] for row, token, _ in kept], np.array([score for _, _, score in kept])
        log_probs, state = model.read(np.array([[token] for _, token, _ in kept]), [x[order] for x in state])
        log_probs = log_probs[:, -1]
    return sorted(done, key=lambda found: -found[0])


def score(model, path):
    """Return the perplexity of a text, with the ends of its lines, read as one stream or line by line, as in training.

    Raises ValueError for a text without a token to predict.
    """
    lines = [[*model.number(line), model.eos] for line in read_lines(path)]
    lines = lines if model.by_lines else [[*chain.from_iterable(lines)]]
    texts = [np.array([[*model.before, *line]], np.int64) for line in lines if len([*model.before, *line]) > 1]
    if not texts:
        raise ValueError(f"the text must have at least a line, got {path}, which is empty")
    total, count = 0.0, sum(tokens.shape[1] - 1 for tokens in texts)
    for tokens in texts:
        state = model.start()
        for first in range(0, tokens.shape[1] - 1, 64):
            piece = tokens[:, first : first + 65]
            log_probs, state = model.read(piece[:, :-1], state)
            total += np.take_along_axis(log_probs, piece[:, 1:, None], 2).sum()
    return math.exp(-total / count)


def measure(model):
    """Print the time of a token, and the memory of the process, after more and more tokens."""
    print("| tokens read | ms a token | memory, MB |\n| ---: | ---: | ---: |")
    state, read, token = model.start(), 0, np.array([[model.unk]])
    for length in (256, 1024, 4096, 16384):
        while read + 64 <= length - 32:
            _, state = model.read(np.repeat(token, 64, 1), state)
            read += 64
        times = []
        for _ in range(length - read):
            start = time.process_time()
            _, state = model.read(token, state)
            times.append(time.process_time() - start)
        read, memory = length, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"| {length:,} | {1000 * min(times):.2f} | {memory:.0f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", nargs="?", default="", help="what the model translates or continues; none: a new line")
    parser.add_argument(
        "--lines", type=Path, metavar="FILE", help="a text a line, for each of which the best is printed"
    )
    parser.add_argument("--tokens", type=int, help="at most so many (default 40, in translation 200)")
    parser.add_argument("--beam", type=int, help="print the best endings of a beam search of this size")
    parser.add_argument("--sample", type=int, default=1, metavar="K", help="draw from the K most probable words (1)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of --sample (default 1)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--score", type=Path, metavar="FILE")
    given = parser.parse_args()
    for name in ("tokens", "beam", "sample", "threads"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(given, name)}")
    if not 0 < given.temperature < math.inf:
        parser.error(f"--temperature must be finite and above 0, got {given.temperature}")
    if file := next((path for path in (given.lines, given.score) if path and not path.is_file()), None):
        sys.exit(f"generate.py: the text must be a file, got {file}")
    model = Model(given.folder, given.threads)
    length = given.tokens or (200 if model.memory else 40)
    if model.memory and (given.measure or given.score):
        parser.error("--measure and --score must be left out with a translation model")
    try:
        if given.measure:
            measure(model)
        elif given.score:
            print(f"perplexity {score(model, given.score):.2f}")
        else:
            for text in read_lines(given.lines) if given.lines else [given.text]:
                write(model, text, length, given)
    except ValueError as error:  # of a text
        sys.exit(f"generate.py: {error}")


def write(model, text, length, given):
    """Print what the model makes of a text: of a file's lines the best only."""
    tokens, state = model.begin(text)
    if given.beam:
        best = beam_search(model, tokens, state, length, given.beam)
        for found, tokens in best[:1] if given.lines else best:
            print(f"{found:.4f}\t{model.decode(tokens)}", flush=True)
        return
    for token in sample(model, tokens, state, length, given.sample, given.temperature, given.seed):
        print(f"{model.words[token]} ".replace("@@ ", ""), end="", flush=True)
    print()


if __name__ == "__main__":
    main()
