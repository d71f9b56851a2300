"""Compare two installations of the plugin to the last bit: the one that runs this script, and an earlier one.

    python tests/nightly/compare_installations.py /path/to/before/.venv/bin/python

Every architecture, every rule, map and option of attention is built small by its flags, from one seed. Compared are
the initial weights, the loss and its gradients, the state carried to a second segment, and decoding token by token.
Then come a training that one installation begins and the other resumes, and converted checkpoints. Prints what
differs and ends with status 1 if anything does.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SIZES = {"layers": "2", "embed-dim": "16", "ffn-embed-dim": "24", "attention-heads": "4"}
LM = [word for name, size in SIZES.items() for word in (f"--decoder-{name}", size)]
MT = [*(word.replace("decoder", "encoder") for word in LM), *LM]
NORMALIZATIONS = (
    "--sum-normalization",
    "--attention-normalization",
    "--attention-normalization --attention-normalization-read-out-only",
    "--sum-normalization --attention-normalization --add-normalization-epsilon --normalization-epsilon 0.01",
    "--sum-normalization --sum-normalization-epsilon 0.02",
    "--l2-normalization",
    "--l2-normalization --negative-eigenvalues",
)
MAPS = (
    "elu",
    "favor --favor-features 3 --favor-draw gaussian --favor-offset 1e-4 --favor-redraw 0",
    "favor --favor-softmax-scale --favor-draw authors",
    "dpfp --dpfp-nu 2",
    "relu --relu-features 5",
    "tanh",
    "identity",
)
OPTIONS = (
    "--scale-read-out",
    "--norm-read-out",
    "--attention-bias",
    "--decoder-key-dim 3",
    "--no-token-positional-embeddings",
    "--decoder-learned-pos",
    "--positions-from-end",
    "--final-dropout 0.2",
    "--decoder-normalize-before",
    "--output-layer tied --adaptive-softmax-cutoff 10,20 --div-val 2",
    "--fwp-backend reference",
    "--decoder-update-rule softmax --attention-window 3",
    "--decoder-update-rule softmax --attention-bias --attention-dropout 0.1",
    "--softmax-layers 1",
    "--softmax-layers 0 --attention-window 3",
)
TRANSLATIONS = (
    "--encoder-feature-map softmax",
    "--cross-feature-map softmax --scale-read-out",
    "--decoder-update-rule softmax",
    "--decoder-update-rule softmax --encoder-feature-map softmax --cross-feature-map softmax",
    "--attention-bias --normalization-epsilon 0.01 --add-normalization-epsilon",
    "--decoder-update-rule gated_delta --l2-normalization",
)
LAYERS = (
    "",
    "--fwl-base fwp_xl_lm --mem-len 4",
    "--fwl-map-inputs --fwl-hidden-dim 40 --fwl-step-size 0.1",
    "--fwl-random-start --fwl-decay 0.5",
    "--fwl-fast-weights softmax-bias",
    "--fwl-gradients-at carried --fwl-divide-gradients-by 8",
)
POSITIONS = (
    "--same-length --mem-len 3",
    "--decoder-positions shaw --clamp-len 3",
    "--decoder-positions shaw_biased --clamp-len 3",
    "--decoder-positions absolute --mem-len 0",
    "--decoder-positions layerwise --mem-len 0",
    "--untie-biases --clamp-len 4 --half-loss",
)


def cases():
    """Return flags by name: every architecture, and the options of each model."""
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY

    from fairseq_fwp.modules.update_rules import UPDATE_RULES

    tables = {"fwp_lm": LM, "fwp_xl_lm": LM, "fwp_fwl_lm": LM, "fwp_transformer": MT, "fwp_associative_retrieval": []}
    for arch, model in ARCH_MODEL_NAME_REGISTRY.items():
        if model in tables:
            yield arch, ["--arch", arch, *tables[model]]
    rules = [f"--decoder-update-rule {rule}" for rule in UPDATE_RULES]
    pairs = [f"{rule} {more}" for rule, more in itertools.product(rules, NORMALIZATIONS)]
    maps = [f"--decoder-feature-map {name}" for name in MAPS]
    maps += [f"{rule} {name}" for rule, name in itertools.product(rules, ("--decoder-feature-map dpfp",))]
    for model, options in (
        ("fwp_lm", (*rules, *pairs, *maps, *OPTIONS)),
        ("fwp_xl_lm", POSITIONS),
        ("fwp_fwl_lm", LAYERS),
        ("fwp_transformer", (*TRANSLATIONS, *pairs[:6])),
    ):
        for flags in options:
            yield f"{model} {flags}".strip(), ["--arch", model, *tables[model], *flags.split()]


def digest(*tensors):
    """Return a short name of the values, which depends on all their bits."""
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(tensor.detach().contiguous().numpy().tobytes())
    return content.hexdigest()[:12]


def dictionary(folder, name):
    (folder / name).write_text("".join(f"w{number} 1\n" for number in range(40)))


def build(flags, folder):
    """Return the model and its task, as fairseq-train builds them."""
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    arch = flags[1]
    task = ["fwp_language_modeling", "--tokens-per-sample", "8", "--max-target-positions", "16"]
    if "_mt_" in arch or arch == "fwp_transformer":
        task = ["translation", "-s", "en", "-t", "de"]
    if "retrieval" in arch:
        task = ["fwp_associative_retrieval", "--num-keys", "6"]
    data = [] if "retrieval" in arch else [str(folder)]
    arguments = [*data, "--task", *task, *flags]
    args = options.parse_args_and_arch(options.get_training_parser(), arguments)
    cfg = convert_namespace_to_omegaconf(args)
    made = tasks.setup_task(cfg.task)
    torch.manual_seed(1)
    return made.build_model(cfg.model), made


def measure(flags, folder):
    """Return the parts of a model that are compared."""
    model, task = build(flags, folder)
    found = {"weights": digest(*model.state_dict().values()), "names": digest_text(model.state_dict())}
    torch.manual_seed(2)
    tokens = torch.randint(4, 40, (3, 16))
    retrieves = hasattr(task, "num_keys")
    if not retrieves:
        tokens[1, 6:8] = task.source_dictionary.pad()
    model.train()
    if retrieves:
        out = model(tokens[:, :8] % 6, tokens[:, 8:] % 6, tokens[:, :4] % 6)
        state = None
    elif hasattr(model, "encoder"):
        out, state = model(tokens, torch.tensor([16, 16, 16]), tokens[:, :8])[0], None
    else:
        features, extra = model(tokens[:, :8])
        state = extra["state"].detach()
        second, extra = model.decoder(tokens[:, 8:], state=state)
        softmax = model.decoder.adaptive_softmax
        out = torch.cat([softmax.get_log_prob(part, None) for part in (features, second)], 1)
    loss = out.log_softmax(-1)[..., 3].double().sum()
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    found |= {"loss": loss.item().hex(), "gradients": digest(*gradients)}
    model.eval()
    with torch.no_grad():
        if hasattr(model, "encoder"):
            source = model.encoder.forward_torchscript({"src_tokens": tokens, "src_lengths": torch.tensor([16] * 3)})
            kept = {}
            steps = [model.decoder(tokens[:, : n + 1], source, incremental_state=kept)[0] for n in range(6)]
            found["decoding"] = digest(*steps)
        elif state is not None:
            kept = {}
            steps = [model.decoder(tokens[:, : n + 1], incremental_state=kept)[0][:, -1] for n in range(12)]
            found["decoding"] = digest(*steps)
            found["numbers of state"] = model.decoder.state_size(8, True)
    return found


def digest_text(names):
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]


def scores(folder):
    """Return the results of `measure` by case; a case that cannot be built has the error."""
    import fairseq_fwp  # noqa: F401

    torch.set_num_threads(1)
    found = {}
    for name, flags in cases():
        torch.manual_seed(0)
        try:
            with contextlib.redirect_stderr(None), contextlib.redirect_stdout(None):
                found[name] = measure(flags, folder)
        except (ValueError, SystemExit) as error:
            found[name] = {"refused": type(error).__name__}
            print(f"{name}: {error}", file=sys.stderr)
    return found


# Trainings that one installation begins and the other resumes, and conversions of a softmax checkpoint.
TRAININGS = (
    "--arch delta_lm_wt103 --carry-state",
    "--arch kda_lm_wt103 --carry-state",
    "--arch decay_lm_wt103 --carry-state",
    "--arch xl_lm_wt103 --mem-len 8 --carry-state",
    "--arch fwl_local_lm_wt103 --attention-window 4 --carry-state",
    "--arch softmax_lm_wt103",
)
CONVERSIONS = (
    "--decoder-update-rule decay --state-size 4",
    "--decoder-update-rule delta --decoder-feature-map relu --sum-normalization",
    "--decoder-update-rule gated --attention-normalization --decoder-feature-map elu",
    "--decoder-update-rule softmax --attention-window 4",
)
# Python does not search the current folder, which may have a package of ours.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
UPDATES = (
    "--optimizer adam --lr 0.01 --criterion adaptive_loss --ddp-backend legacy_ddp --batch-size 4 --cpu "
    "--data-buffer-size 0"  # none is read ahead by a thread, which may not have ended when Python does
)


def command(python, name, *arguments):
    """Run a command of an installation. Return its output."""
    line = [str(Path(python).parent / name), *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, env=ENVIRONMENT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)}\n{done.stdout}{done.stderr}")
    return done.stdout


def train(python, data, folder, flags, updates):
    """Train up to that many updates. Return the parts of the checkpoint."""
    settings = [*LM, *UPDATES.split(), "--tokens-per-sample", 8, "--task", "fwp_language_modeling"]
    saving = ["--save-dir", folder, "--max-update", updates, "--no-epoch-checkpoints", "--disable-validation"]
    command(python, "fairseq-train", data, *flags.split(), *settings, *saving, "--user-dir", package(python))
    saved = torch.load(folder / "checkpoint_last.pt", weights_only=False)
    moments = [part for _, state in sorted(saved["last_optimizer_state"]["state"].items()) for part in state.values()]
    return {
        "weights": digest(*saved["model"].values()),
        "names": digest_text(saved["model"]),
        "optimizer": digest(*(part for part in moments if torch.is_tensor(part))),
    }


def package(python):
    code = "import fairseq_fwp, pathlib; print(pathlib.Path(fairseq_fwp.__file__).parent)"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT
    ).stdout.strip()


def write_data(folder):
    """Write a text of random words, preprocessed by fairseq."""
    generator = torch.Generator().manual_seed(5)
    text = folder / "text"
    lines = torch.randint(36, (120, 9), generator=generator).tolist()
    text.write_text("\n".join(" ".join(f"w{word}" for word in line) for line in lines) + "\n")
    arguments = ["--only-source", "--trainpref", text, "--validpref", text, "--testpref", text]
    command(sys.executable, "fairseq-preprocess", *arguments, "--destdir", folder / "data", "--workers", 1)
    return folder / "data"


def trainings(before, data, folder):
    """Yield (name, earlier, this): four updates, the last two by another installation."""
    for index, flags in enumerate(TRAININGS):
        one, other = (folder / f"{index}-{name}" for name in ("one", "other"))
        train(before, data, one, flags, 2)
        train(before, data, other, flags, 2)
        yield f"resumed {flags}", train(before, data, one, flags, 4), train(sys.executable, data, other, flags, 4)
    source = one / "checkpoint_last.pt"  # of softmax
    (one / "dict.txt").write_bytes((data / "dict.txt").read_bytes())
    for index, flags in enumerate(CONVERSIONS):
        results = []
        for name, python in (("before", before), ("now", sys.executable)):
            out = folder / f"converted-{index}-{name}"
            command(python, "fwp-convert", source, "--source", "fwp-lm", "--out", out, *flags.split())
            table = out / "scores.tsv"
            command(python, "fwp-eval-lm", data, "--path", out / "checkpoint.pt", "--stride", 4, "--scores", table)
            given = sorted((out / "flags.txt").read_text().strip().split(" --"))
            results.append({"flags": given, "scores": digest_text(table.read_text())})
        yield f"converted {flags}", *results


def differences(before, now):
    """Return the parts in which two results differ; a case of only one of them is new, or gone."""
    for name in before:
        if name not in now:
            yield f"{name}: gone"
        elif before[name] != now[name]:
            parts = sorted(
                key for key in before[name].keys() | now[name].keys() if before[name].get(key) != now[name].get(key)
            )
            yield f"{name}: {', '.join(parts)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", help="the Python of the installation of before")
    parser.add_argument("--print", action="store_true", help="print this installation's scores as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("dict.txt", "dict.en.txt", "dict.de.txt"):
            dictionary(folder, part)
        if args.print:
            print(json.dumps(scores(folder), indent=1))
            return
        printed = [
            subprocess.run(
                [python, __file__, "--print"], capture_output=True, text=True, check=True, env=ENVIRONMENT
            ).stdout
            for python in (args.before, sys.executable)
        ]
        before, now = map(json.loads, printed)
        found = list(differences(before, now))
        count = len(before)
        print(f"{count} models, {sum('refused' in case for case in now.values())} of them refused", flush=True)
        for name, one, other in trainings(args.before, write_data(folder), folder):
            count += 1
            found += differences({name: one}, {name: other})
    print("\n".join(found) or f"{count} cases, none differs")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
