"""A language model of this package as EleutherAI's lm-evaluation-harness wants it, registered there as `fwp`.

    lm_eval.simple_evaluate(Harness("checkpoint_best.pt", dictionary="DATA"), tasks=["lambada_openai"])

Needs the packages lm_eval and tokenizers; cli/harness.py is the command.
"""

import hashlib
import io
import logging
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, takewhile
from pathlib import Path
from typing import Any, TypeAlias

import torch
from fairseq.data import Dictionary
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import chunks, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

import fairseq_fwp
from fairseq_fwp.modules.onednn import faster_linear
from fairseq_fwp.patches.options import Settings
from fairseq_fwp.patches.words import Pieces

logger = logging.getLogger(__name__)

# Tokens that are read, and those after them, which are scored.
Part: TypeAlias = tuple[list[int], list[int]]
TOKENS_AT_ONCE = 256  # whose log-probabilities of all words are in memory
MOST_NEW_TOKENS = 256  # of a generation, where a task sets no number


class Words:
    """Words between spaces, each line ended by </s>, as fairseq-preprocess reads a text; cut: into their pieces."""

    def __init__(self, cut: Pieces) -> None:
        self.dictionary, self.cut, self.rules = cut.dictionary, cut, cut.codes

    def pieces(self, text: str) -> list[tuple[int, str]]:
        """Return the tokens of a text with their words, as unknown words are one token."""
        pieces: list[tuple[int, str]] = []
        for line in io.StringIO(text, newline=None):  # ends a line where a file does, unlike splitlines
            words = self.cut(line).split()
            numbers = [*map(self.dictionary.index, words)]
            if self.dictionary.pad() in numbers:
                raise ValueError(f"a text must not have the word {self.dictionary.pad_word}, which fills up lines")
            pieces += zip(numbers, words, strict=True)
            pieces += [(self.dictionary.eos(), "\n")] * line.endswith("\n")
        return pieces

    def decode(self, tokens: Sequence[int]) -> str:
        eos = self.dictionary.eos()
        text = " ".join("\n" if token == eos else self.dictionary[token] for token in tokens)
        return text.replace("@@ ", "").replace(" \n ", "\n").replace(" \n", "\n").replace("\n ", "\n")


class Numbers:
    """The tokens of tokenizer.json, whose numbers are the words of the dictionary, as fwp-convert writes them.

    Raises ValueError unless all numbers but one, which is </s>, are words.
    """

    def __init__(self, dictionary: Dictionary, file: Path) -> None:
        from tokenizers import Tokenizer

        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise ValueError(f"tokenizer must be tokenizer.json or its folder, got {file}, which does not exist")
        try:
            self.tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # it has no type of its own
            raise ValueError(f"tokenizer must be a tokenizer.json, got {file}: {error}") from error
        self.tokenizer.no_truncation()  # a text is read whole, whatever was saved with the tokenizer
        self.tokenizer.no_padding()
        self.rules = self.tokenizer.to_str()
        rows = {int(word): row for row, word in enumerate(dictionary.symbols) if word.isdecimal()}
        least = self.tokenizer.get_vocab_size()
        missing = [number for number in range(max(least, len(rows) + 1)) if number not in rows]
        if len(missing) > 1:
            raise ValueError(f"the dictionary must have the numbers of the {least} tokens in {file}, got other words")
        self.rows = rows | dict.fromkeys(missing, dictionary.eos())
        self.numbers = {row: number for number, row in self.rows.items()}

    def pieces(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        """Return the tokens of a text with their places in it, as unknown words are one token."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return [(self.rows[number], place) for number, place in zip(encoding.ids, encoding.offsets, strict=True)]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode([self.numbers[token] for token in tokens if token in self.numbers]))


def _shared(tokens: Sequence[object], others: Sequence[object]) -> int:
    """Return the number of first tokens that two texts have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False)))


def find_device(name: str | None) -> torch.device:
    """Return a device by its name. The harness's own default is a GPU, also where there is none."""
    try:
        device = torch.device(name or "cuda")
    except RuntimeError:
        raise ValueError(f"device must be cpu or cuda, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        logger.warning("there is no GPU for PyTorch: the model runs on the CPU")
        return torch.device("cpu")
    return device


@register_model("fwp")
class Harness(TemplateLM):
    """A language model of this package as the harness wants it.

    path, dictionary, source, end, line_start: as for `fairseq_fwp.load`: a checkpoint and the folder of its dictionary,
        or a folder, and options of its source;
    tokenizer: tokenizer.json or its folder, for a dictionary of numbers of tokens. Without it a text is words between
        spaces.
    bpe_codes: of subword-nmt, for a text of words; None: those next to the dictionary, if any;
    max_length: tokens that the model reads before it scores one, by default those of a training sample: a longer
        context loses its first ones. To be continued, it also leaves learned positions for the new tokens;
    batch_size: requests of one length at once; device: "cpu", "cuda", by default a GPU. Without one it is the CPU.

    A request's result does not depend on the others. Raises ValueError, OSError for what cannot be loaded.
    """

    def __init__(
        self,
        path: str,
        dictionary: str | None = None,
        source: str = "fwp-lm",
        end: str | None = None,
        line_start: str | None = None,
        tokenizer: str | None = None,
        bpe_codes: str | None = None,
        max_length: int | None = None,
        batch_size: int = 8,
        device: str | None = None,
    ) -> None:
        super().__init__()
        for name, number in (("batch_size", batch_size), ("max_length", 1 if max_length is None else max_length)):
            if not str(number).isdecimal() or int(number) < 1:
                raise ValueError(f"{name} must be a whole number above 0, got {number}")
        if tokenizer and bpe_codes:
            raise ValueError("tokenizer must be left out with bpe_codes, which are for a text of words")
        of_source = {name: value for name, value in (("end", end), ("line_start", line_start)) if value is not None}
        loaded = fairseq_fwp.load(path, dictionary=dictionary, source=source, **of_source)
        self._device = find_device(device)
        self.decoder, self.dictionary = loaded.to(self._device).model.decoder, loaded.dictionary
        self.beginning = loaded.beginning
        self.max_length, self.batch_size = int(max_length or self.decoder.max_positions()), int(batch_size)
        self.positions: int = loaded.model.max_decoder_positions()
        if self.max_length > self.positions:
            raise ValueError(f"max_length must be at most {self.positions}, the learned positions, got {max_length}")
        pieces = Pieces(self.dictionary, Path(bpe_codes)) if bpe_codes else loaded.pieces
        self.text = Numbers(self.dictionary, Path(tokenizer)) if tokenizer else Words(pieces)

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Keep answers in a cache of this model: the harness finds them only by their requests.

        Raises ValueError for a cache with answers of another model.
        """
        cache = cache_hook.dbdict
        if cache is not None:
            if len(cache) == 0:
                cache["model"] = self.fingerprint()
            elif cache.get("model") != self.fingerprint():
                got = f"{cache.filename}, whose answers are of another: give another path, or remove it"
                raise ValueError(f"--use_cache must be a new path or one that this model has used, got {got}")
        super().set_cache_hook(cache_hook)

    def fingerprint(self) -> str:
        """Return a number of the weights and of all settings that answers depend on."""
        settings = (self.max_length, self.beginning, self.dictionary.symbols, self.text.rules)
        digest = hashlib.sha256(repr(settings).encode())
        for name, tensor in self.decoder.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    @property
    def tokenizer_name(self) -> str:
        """Raise ValueError: the harness only asks for it to apply a chat template."""
        raise ValueError("--apply_chat_template must be left out, as these models have no chat template")

    @property
    def eot_token_id(self) -> int:
        return int(self.dictionary.eos())

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        return [token for token, _ in self.text.pieces(string)]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether each of its tokens is the most probable one."""
        pairs = [request.args for request in requests]
        found = self._sums([self._encode_pair(*pair) for pair in pairs])
        for pair, score in zip(pairs, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", pair, score)
        return found

    def _encode_pair(self, context: str, continuation: str) -> list[Part]:
        """Return the parts of a continuation after a context; a token that both have letters of is scored.

        Raises ValueError for a continuation without a token to predict.
        """
        whole = self.text.pieces(context + continuation)
        tokens = [token for token, _ in whole]
        # Spaces before the continuation are part of it, as a word is part of a token with the space before it.
        shared = _shared(self.text.pieces(context.rstrip()), whole)
        if self.beginning.of_lines:
            parts = self._lines(tokens, shared)
            own = self._lines(tokens, _shared(self.text.pieces(context), whole))  # not its line's end
        elif context:
            own = parts = [(tokens[:shared] or self.beginning.tokens, tokens[shared:])]
        else:  # the token of the beginning stands for the context, also where the continuation has it
            own = parts = [(self.beginning.tokens, tokens[tokens[:1] == self.beginning.tokens :])]
        if not any(scored for _, scored in own):
            got = f"{continuation!r} after {context[-60:]!r}{self._unscored}"
            raise ValueError(f"a continuation must have at least one token, got none in {got}")
        return [(read, scored) for read, scored in parts if scored]

    @property
    def _unscored(self) -> str:
        """Words for errors about a text without a token to score."""
        return ", as the model reads the first word of a line and does not score it" * (self.beginning.first is None)

    def _lines(self, tokens: list[int], first: int) -> list[Part]:
        """Return the lines of a text in which tokens from number `first` on are scored, each read by itself."""
        parts, start = [], 0
        ends = [place + 1 for place, token in enumerate(tokens) if token == self.eot_token_id]
        for end in sorted({*ends, len(tokens)}):
            line = [*self.beginning.tokens, *tokens[start:end]]
            read = max(1, len(line) - (end - max(start, first)))
            parts.append((line[:read], line[read:]))
            start = end
        return parts

    def _sums(self, texts: list[list[Part]]) -> list[tuple[float, bool]]:
        """Return the log-probability of each text, and whether each of its tokens is the most probable one."""
        scores = iter(self._loglikelihood_tokens([(("", ""), *part) for parts in texts for part in parts]))
        of_texts = ([next(scores) for _ in parts] for parts in texts)
        return [(sum(score for score, _ in found), all(greedy for _, greedy in found)) for found in of_texts]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text: blocks of max_length tokens, each token scored once.

        A model of lines reads each line by itself. Raises ValueError for a text without a token to predict.
        """
        sums = []
        for (text,) in [request.args for request in requests]:
            tokens = self.tok_encode(text)
            parts = self._lines(tokens, 0) if self.beginning.of_lines else [(self.beginning.tokens, tokens)]
            parts = [(read, scored) for read, scored in parts if scored]
            if not parts:
                raise ValueError(
                    f"a text to score must have at least one token, got none in {text[:60]!r}{self._unscored}"
                )
            windows = (get_rolling_token_windows(scored, *read, self.max_length, 1) for read, scored in parts)
            ((score, _),) = self._sums([[make_disjoint_window(window) for window in chain.from_iterable(windows)]])
            sums.append(score)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), score)
        return sums

    def _loglikelihood_tokens(self, requests: Any, **kwargs: object) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether each of its tokens is the most probable one."""
        scores: dict[int, tuple[float, bool]] = {}
        for batch in self.batches([[*context, *continuation] for _, context, continuation in requests]):
            tokens = torch.tensor([row for _, row in batch], device=self.device)
            with torch.no_grad(), faster_linear():
                features = self.decoder(tokens[:, :-1])[0]
                for (index, _), x, row in zip(batch, features, tokens, strict=True):
                    scores[index] = self.score(x, row[1:], len(requests[index][2]))
        return [scores[index] for index in range(len(requests))]

    def batches(self, rows: list[list[int]]) -> Iterator[list[tuple[int, list[int]]]]:
        """Yield rows of one length, at most batch_size, with their indices; a row keeps its last max_length + 1."""
        most = self.max_length + 1
        if cut := sum(len(row) > most for row in rows):
            logger.warning(f"{cut} requests lose their first tokens, as the model reads at most {self.max_length}")
        ordered = sorted(((index, row[-most:]) for index, row in enumerate(rows)), key=lambda pair: len(pair[1]))
        for _, alike in groupby(ordered, key=lambda pair: len(pair[1])):
            yield from chunks(alike, self.batch_size)

    def score(self, features: Tensor, targets: Tensor, scored: int) -> tuple[float, bool]:
        """Return the sum of the last log-probabilities, and whether all are the greatest.

        features (L, D), targets (L,). Raises ValueError for more scored tokens than were read.
        """
        if scored > len(targets):
            raise ValueError(f"a continuation must have at most max_length = {self.max_length} tokens, got {scored}")
        total, greedy, first = 0.0, True, len(targets) - scored
        pieces = (x[first:].split(TOKENS_AT_ONCE) for x in (features, targets))
        for x, words in zip(*pieces, strict=True):
            log_probs = self.decoder.adaptive_softmax.get_log_prob(x.unsqueeze(0), None)[0]
            total += float(log_probs.gather(1, words.unsqueeze(1)).sum(dtype=torch.float64))
            greedy &= bool(log_probs.argmax(1).eq(words).all())
        return total, greedy

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context up to a stop string, </s> or max_gen_toks tokens; greedy, or sampled by temperature.

        Raises ValueError for another way to choose tokens.
        """
        texts = []
        for context, kwargs in [request.args for request in requests]:
            settings: Settings = normalize_gen_kwargs(kwargs, MOST_NEW_TOKENS)
            until, most = settings.pop("until"), settings.pop("max_gen_toks")
            sampled, temperature = settings.pop("do_sample"), settings.pop("temperature", 0.0)
            if most < 1:
                raise ValueError(f"max_gen_toks must be a whole number above 0, got {most}")
            if settings.get("num_beams") == 1:  # as tasks say greedy
                del settings["num_beams"]
            if settings or not temperature >= 0:
                got = ", ".join(settings) or f"temperature {temperature}"
                raise ValueError(f"generation must be by do_sample and temperature, 0 or more, got {got}")
            texts.append(self.generate(context, [stop for stop in until if stop], most, sampled * temperature))
            self.cache_hook.add_partial("generate_until", (context, kwargs), texts[-1])
        return texts

    @torch.no_grad()
    def generate(self, context: str, until: list[str], most: int, temperature: float) -> str:
        """Return the text after a context, without the stop string that ended it.

        Raises ValueError for more new tokens than learned positions leave room for, and for a context without the word
        that the model begins with.
        """
        room = min(self.max_length, self.positions - most)
        if room < 1:
            says = f"new tokens must be fewer than the {self.positions} learned positions, got up to {most}"
            raise ValueError(f"{says}: give a smaller number with --gen_kwargs max_gen_toks=N")
        read = self.tok_encode(context)
        if self.beginning.of_lines:  # the last line begins after the last end of one
            start = max((place + 1 for place, token in enumerate(read) if token == self.eot_token_id), default=0)
            read = [*self.beginning.tokens, *read[start:]]
        read = read or self.beginning.tokens
        if not read:
            raise ValueError(f"a context must end with a line that has a word to begin with, got {context[-60:]!r}")
        prefix = torch.tensor([read[-room:]], device=self.device)
        state: Settings = {}
        tokens: list[int] = []
        text = ""
        while len(tokens) < most and not any(stop in text for stop in until):
            log_probs = self.decoder(prefix, incremental_state=state)[0][0, -1]
            if temperature:
                chosen = int(torch.multinomial((log_probs / temperature).softmax(0), 1))
            else:
                chosen = int(log_probs.argmax())
            if chosen == self.eot_token_id:
                break
            tokens.append(chosen)
            prefix = torch.cat([prefix, prefix.new_tensor([[chosen]])], 1)
            text = self.text.decode(tokens)
        return str(postprocess_generated_text(text, until, None))
