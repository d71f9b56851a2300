"""Foreign files run no code: checkpoints, their configurations, paths, archives and settings."""

import ast
import functools
import hashlib
import importlib
import io
import os
import pickle
import re
import subprocess
import sys
import tarfile
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import fairseq
import fairseq_cli
import pytest
import torch
from fairseq import checkpoint_utils, file_utils, utils
from fairseq.data import Dictionary, FileAudioDataset, codedataset, data_utils
from fairseq.data.audio.data_cfg import S2TDataConfig
from fairseq.models.speech_to_text.hub_interface import S2THubInterface
from small_text import write_text

from fairseq_fwp.patches import checkpoints, data

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes"


class Touch:
    """An object that is pickled as a call that makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


@pytest.fixture
def canary(tmp_path):
    """The path of a file that must not be made."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists()


def test_the_canary_dies_of_a_pickle_that_is_trusted(tmp_path):
    path = tmp_path / "canary"
    torch.save({"model": Touch(path)}, tmp_path / "checkpoint.pt")
    torch.load(tmp_path / "checkpoint.pt", weights_only=False)
    assert path.exists()


@pytest.mark.parametrize("place", ["model", "cfg", "extra_state"])
def test_objects_in_a_checkpoint_are_refused_with_what_trusts_them(tmp_path, canary, place):
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": {}, "cfg": {}, "args": None, "extra_state": {}, place: Touch(canary)}, path)
    sentence = r"checkpoint.pt holds pickled objects \(\S*system\), .* set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1$"
    with pytest.raises(RuntimeError, match=sentence) as error:
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert "\n" not in str(error.value)


def test_they_are_refused_where_torch_would_run_them(tmp_path, canary, monkeypatch):
    """torch 2.4 and 2.5 run code by default."""
    load, path = torch.load, tmp_path / "checkpoint.pt"

    def earlier(*args, weights_only=None, **kwargs):
        return load(*args, weights_only=bool(weights_only), **kwargs)

    monkeypatch.setattr(torch, "load", functools.partial(checkpoints.load_weights_only, earlier))
    for content in ({"model": Touch(canary)}, {"no model": Touch(canary)}):
        torch.save(content, path)
        with pytest.raises(RuntimeError, match="holds pickled objects"):
            checkpoint_utils.load_checkpoint_to_cpu(str(path))
    torch.save(Touch(canary), tmp_path / "text.f0_stat.pt")  # a data set's file, which fairseq loads by itself
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(tmp_path / "text.f0_stat.pt")


def test_they_are_run_where_they_are_trusted(tmp_path, monkeypatch):
    path = tmp_path / "canary"
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"model": Touch(path)}, tmp_path / "checkpoint.pt")
    with pytest.raises(RuntimeError, match="must have everything that fairseq saves with a model"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "checkpoint.pt"))
    assert path.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["fairseq-eval-lm", "fairseq-generate", "fairseq-train", "fwp-eval-lm", "fwp-convert"]
)
def test_every_command_refuses_them(tmp_path, canary, command):
    write_text(tmp_path)
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": Touch(canary), "cfg": None, "args": None}, path)
    arguments = {
        "fairseq-eval-lm": [tmp_path, "--path", path],
        "fairseq-generate": [tmp_path, "--path", path, "--task", "language_modeling"],
        "fairseq-train": [tmp_path, "--task", "language_modeling", "--arch", "fwp_lm", "--batch-size", 1]
        + ["--optimizer", "adam", "--restore-file", path, "--save-dir", tmp_path / "save", "--cpu", "--max-update", 1],
        "fwp-eval-lm": [tmp_path, "--path", path],
        "fwp-convert": [
            path,
            "--source",
            "schlag-lm",
            "--out",
            tmp_path / "out",
            "--vocabulary",
            tmp_path / "dict.txt",
        ],
    }[command]
    program = [Path(sys.executable).with_name(command)]
    if command.startswith("fwp"):
        program = [sys.executable, "-m", f"fairseq_fwp.cli.{command.removeprefix('fwp-').replace('-', '_')}"]
    else:
        arguments += ["--user-dir", ROOT / "fairseq_fwp"]
    result = subprocess.run(list(map(str, [*program, *arguments])), capture_output=True, text=True, check=False)
    assert result.returncode != 0 and "pickled objects" in result.stderr.strip().splitlines()[-1], result.stderr


def test_a_configuration_is_no_code(tmp_path, canary):
    """A model of fairseq's whose filters of characters fairseq evaluates as code."""
    write_text(tmp_path)
    code = f"[__import__('pathlib').Path({str(canary)!r}).touch()]"
    model = {"_name": "transformer_lm", "character_embeddings": True, "character_filters": code}
    task = {"_name": "language_modeling", "data": str(tmp_path), "max_target_positions": 64, "tokens_per_sample": 64}
    config = {"model": model, "task": task | {"add_bos_token": False}, "criterion": None, "common": {"tpu": False}}
    history = [{"optimizer_name": "adam", "lr_scheduler_state": {}, "num_updates": 1}]
    state = {"cfg": config, "args": None, "model": {}, "optimizer_history": history, "extra_state": {}}
    torch.save(state | {"last_optimizer_state": None, "task_state": {}}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"must be a number, .*, got the code .*, which is not run"):
        checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "checkpoint.pt")])


@pytest.mark.parametrize(
    "text, value",
    [
        ("[(512, 3)] * 2 + [(1, -2)]", [(512, 3), (512, 3), (1, -2)]),
        ("(0.9, 0.98)", (0.9, 0.98)),
        ("1e-3,2", (1e-3, 2)),
        (" {'a': [True, None]}", {"a": [True, None]}),
    ],
)
def test_settings_mean_what_they_meant(text, value):
    assert data.evaluate(text) == value == eval(text)
    assert utils.eval_str_list("1,2.5") == [1.0, 2.5] and utils.eval_bool("True")


@pytest.mark.parametrize(
    "text", ["print(1)", "a", "().__class__", "[x for x in 'ab']", "lambda: 1", "f'{1}'", "1 +", "{**a}"]
)
def test_code_is_refused(text):
    with pytest.raises(
        ValueError,
        match=r"got the code .*, which is not run|must be a number, a string, a list or a dictionary of them",
    ):
        data.evaluate(text)


def test_options_that_are_no_strings_are_left_to_fairseq():
    """Some options are evaluated twice, as --left-pad-source: then a TypeError is expected."""
    with pytest.raises(TypeError, match="evaluate must be a string, got bool"):
        data.evaluate(True)
    assert utils.eval_bool(True, default=True) and utils.eval_str_list(0.5) == [0.5]


def evil_zip(path, victim):
    with zipfile.ZipFile(path, "w") as archive:
        for name in (
            "../escaped",
            str(victim / "escaped"),
            "a/../../escaped",
            "wikitext-103/wiki.train.tokens",
            "enwik8",
        ):
            archive.writestr(name, "x")


def evil_tar(path, victim):
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("x.de-en.de")
        link.type, link.linkname = tarfile.SYMTYPE, str(victim)
        archive.addfile(link)
        for name in (
            "../escaped.de-en.de",
            f"{victim}/escaped.de-en.de",
            "x.de-en.de/escaped.de-en.en",
            "a/y.de-en.en",
        ):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))


@pytest.mark.parametrize("make, name", [(evil_zip, "a.zip"), (evil_tar, "a.tgz")])
def test_archives_unpack_nothing_outside_their_folder(tmp_path, make, name):
    """Return a download with the right checksum."""
    folder, victim = tmp_path / "out/download", tmp_path / "victim"
    for made in (folder, victim):
        made.mkdir(parents=True)
    make(tmp_path / "archive", victim)
    checksum = hashlib.sha256((tmp_path / "archive").read_bytes()).hexdigest()
    archive = f"Archive({name!r}, {checksum!r}, ({(tmp_path / 'archive').as_uri()!r},), ('*.de-en.??',))"
    program = f"from fetch import Archive, Path\n{archive}.fetch(Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", program], cwd=RECIPES / "driver", capture_output=True, check=False)
    assert any(path.is_file() and path.name != name for path in folder.rglob("*"))
    assert not [path for path in tmp_path.rglob("*escaped*") if not path.is_relative_to(folder)]


# Spaces, quotes, code, a newline, a pattern, and a dash at the beginning.
AWKWARD = "-a b'c\"d$(touch pwned)`touch pwned`;touch pwned\n* \\é"
LANGUAGE_MODEL = ["language-model", "--text", "peps", "--merges", "60"]
CORPUS = ["language-model", "--text", "wikitext103"]
TRANSLATION = ["translation", "--pairs", "multi30k", "--merges", "60"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, more", [(LANGUAGE_MODEL, []), (CORPUS, ["--any-text"]), (TRANSLATION, [])], ids=lambda x: "-".join(x[:3])
)
def test_recipes_take_any_path(tmp_path, settings, more):
    """Relative paths that begin with a dash; no part of them is run."""
    data = tmp_path / AWKWARD
    data.mkdir()
    line = "the memory is a matrix that every token reads and writes $(touch pwned) `touch pwned`\n"
    names = [f"{split}.{side}" for split in ("train", "val", "test_2016_flickr") for side in ("en", "de")]
    for name in ("train.txt", "valid.txt", "test.txt", *names):
        (data / name).write_text(line * 80)
    command = [sys.executable, str(RECIPES / "driver"), settings[0], "--recipe", str(RECIPES / "peps"), *settings[1:]]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for _ in range(2):  # prepared, and found prepared
        result = subprocess.run(
            [*command, "--", "prepare", f"--data={AWKWARD}", f"--out={AWKWARD} out", *more],
            cwd=tmp_path,
            env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {AWKWARD, AWKWARD + " out"}
    assert not list(tmp_path.rglob("pwned*")) and list((tmp_path / (AWKWARD + " out")).rglob("dict*.txt"))


def test_a_dictionary_runs_nothing(tmp_path, canary):
    (tmp_path / "dict.txt").write_text(f"$(touch {canary}) 1\n`touch {canary}` 1\n")
    assert len(Dictionary.load(str(tmp_path / "dict.txt"))) == 6


CODE = "__import__('pathlib').Path({!r}).touch()"


def test_masks_of_audio_are_no_code(tmp_path, canary):
    """A task's setting precompute_mask_config."""
    (tmp_path / "valid.tsv").write_text(f"{tmp_path}\n")
    with pytest.raises(ValueError, match=r"got the code .*, which is not run"):
        FileAudioDataset(tmp_path / "valid.tsv", 16000, feature_encoder_spec=CODE.format(str(canary)))


def test_lines_of_a_manifest_are_no_code(tmp_path, canary):
    (tmp_path / "train.txt").write_text(CODE.format(str(canary)))
    with pytest.raises(ValueError, match=r"got the code .*, which is not run"):
        codedataset.parse_manifest(tmp_path / "train.txt", Dictionary())


def test_the_name_of_a_text_is_no_command(tmp_path, canary, monkeypatch):
    """fairseq takes the languages of a translation from names of files."""
    monkeypatch.chdir(tmp_path)
    name = f"train.a-b;touch {canary.name};.a"
    (tmp_path / f"{name}.fasta").write_text(">one\nACG\nT\n>two\nGG\n")
    dictionary = Dictionary()
    dataset = data_utils.load_indexed_dataset(name, dictionary, "fasta")
    assert dataset.sizes.tolist() == [4, 2] and dataset.offsets.tolist() == [0, 11]


def test_a_data_folder_gets_no_code_of_a_repository(tmp_path, monkeypatch):
    """A voice that a data folder's configuration names: torch asks before it trusts a repository."""
    (tmp_path / "config.yaml").write_text("hub: {tts_model_id: 'nobody/nothing:voice'}\n")
    asked = []
    monkeypatch.setattr(torch.hub, "_get_cache_or_reload", lambda *args, **kwargs: asked.append(args) or 1 / 0)
    monkeypatch.setattr(S2THubInterface, "detokenize", lambda *args: "")
    task = SimpleNamespace(data_cfg=S2TDataConfig(tmp_path / "config.yaml"))
    generator = SimpleNamespace(generate=lambda *args, **kwargs: [[{"tokens": []}]])
    with pytest.raises(ZeroDivisionError):
        S2THubInterface.get_prediction(task, None, generator, None, synthesize_speech=True)
    assert [args[2] for args in asked] == ["check"]  # torch 2.4 has another default
    assert data.ask_before_code_of_hub(lambda *args, **kwargs: kwargs, "a repository") == {"trust_repo": "check"}


def test_a_data_folders_yaml_is_no_code(tmp_path, canary):
    for call in ("!!python/object/apply:os.system", "!!python/object/new:os.system"):
        (tmp_path / "config.yaml").write_text(f"{call} ['touch {canary}']\n")
        with pytest.raises(Exception, match=r"Failed to load config from (.|\n)*could not determine a constructor"):
            S2TDataConfig(tmp_path / "config.yaml")


@pytest.mark.parametrize("name", ["../escaped", "/{victim}/escaped", "model/../../escaped", "link"])
def test_a_model_is_unpacked_inside_its_folder(tmp_path, name):
    victim, path = tmp_path / "victim", tmp_path / "model.tar.gz"
    victim.mkdir()
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo(name.format(victim=victim))
        member.type, member.linkname = (tarfile.SYMTYPE, str(victim)) if name == "link" else (tarfile.REGTYPE, "")
        archive.addfile(member)
    with pytest.raises(ValueError, match=r"model.tar.gz must have only files and folders below its own, got '"):
        file_utils.load_archive_file(str(path))
    assert path.exists() and not list(tmp_path.rglob("escaped*"))


def test_a_model_is_unpacked(tmp_path):
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as archive:
        (tmp_path / "model.pt").write_text("x")
        archive.add(tmp_path / "model.pt", "model/model.pt")
        archive.add(tmp_path / "model.pt", "model/dict.txt")
    folder = Path(file_utils.load_archive_file(str(tmp_path / "model.tar.gz")))
    assert {file.name for file in folder.iterdir()} == {"model.pt", "dict.txt"}


# Functions that run code or programs, or make objects that a file names.
RUNNERS = (
    r"eval|exec|compile|__import__|globals|(\w+\.)*(import_module|find_spec|CDLL|load_library|hub\.load|jit\.load)|"
    r"(torch|np|numpy|pickle|yaml|dill|joblib|marshal|shelve)\.((?!safe_)\w*load\w*|open|Unpickler)|(\w+\.)?(Unpickler|Popen)|"
    r"subprocess\.\w+|os\.(system|popen|exec\w*|spawn\w*|posix_spawn\w*)|tarfile\.open|(\w+\.)*(extractall|unpack_archive)"
)
# Why no foreign file can use them, besides `eval`, `torch.load` and `np.load`, which are tested below.
FILES, USER = "imports the files of a folder of fairseq's", "only the user names it, in a command"
REASONS = {
    "fairseq.criterions: importlib.import_module": FILES,
    "fairseq.data.audio: importlib.import_module": FILES,
    "fairseq.data.encoders: importlib.import_module": FILES,
    "fairseq.model_parallel.criterions: importlib.import_module": FILES,
    "fairseq.model_parallel.models: importlib.import_module": FILES,
    "fairseq.models: importlib.import_module": FILES,
    "fairseq.models.ema: importlib.import_module": FILES,
    "fairseq.models.huggingface: importlib.import_module": FILES,
    "fairseq.optim: importlib.import_module": FILES,
    "fairseq.optim.lr_scheduler: importlib.import_module": FILES,
    "fairseq.scoring: importlib.import_module": FILES,
    "fairseq.tasks: importlib.import_module": FILES,
    "fairseq.models: globals": FILES,
    "fairseq.tasks: globals": FILES,
    "fairseq.optim.fused_adam: importlib.import_module": "the name is in the code",
    "fairseq.utils: importlib.import_module": f"a --user-dir: {USER}",
    "fairseq_cli.eval_lm: eval": f"--model-overrides: {USER}",
    "fairseq_cli.validate: eval": f"--model-overrides: {USER}",
    "fairseq.tasks.audio_pretraining: subprocess.call": f"saves in training, with --post-save-script: {USER}",
    "fairseq.data.fasta_dataset: subprocess.check_output": "patched: test_the_name_of_a_text_is_no_command",
    "fairseq.models.speech_to_text.hub_interface: torch.hub.load": "patched: test_a_data_folder_gets_no_code_...",
    "fairseq.file_utils: tarfile.open": "patched: test_a_model_is_unpacked_inside_its_folder",
    "fairseq.file_utils: archive.extractall": "patched: test_a_model_is_unpacked_inside_its_folder",
    "fairseq.data.audio.data_cfg: yaml.load": "PyYAML calls nothing: test_a_data_folders_yaml_is_no_code",
    "fairseq.data.plasma_utils: subprocess.Popen": "a fixed program without a shell",
    "fairseq.distributed.utils: subprocess.check_output": "a fixed program without a shell, with a variable of Slurm's",
    "fairseq.distributed.utils: pickle.loads": "from another process of the same training",
    "fairseq.logging.meters: globals": "a saved meter is made by a class of this file, without arguments",
    "fairseq.modules.quantization.scalar.ops: globals": "the beginning of the function's name is in the code",
}


def parse(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in strings
        return ast.parse(path.read_text(encoding="utf-8"))


def calls_that_could_run_code():
    """Yield module, function and call; fairseq's examples are plug-ins, which only --user-dir names."""
    for package in (fairseq, fairseq_cli):
        root = Path(package.__file__).parent
        for path in root.rglob("*.py"):
            parts = path.relative_to(root.parent).with_suffix("").parts
            if parts[1] == "examples":
                continue
            for node in ast.walk(parse(path)):
                if isinstance(node, ast.Call) and re.fullmatch(RUNNERS, name := ast.unparse(node.func)):
                    yield ".".join(parts).removesuffix(".__init__"), name, node


def test_everything_in_fairseq_that_could_run_code_is_known():
    found = list(calls_that_could_run_code())
    for module, name, call in found:
        if name in ("torch.load", "np.load"):  # without these arguments they load only tensors and numbers
            assert not {"pickle_module", "weights_only", "allow_pickle"} & {word.arg for word in call.keywords}, module
        elif name == "eval" and module.startswith("fairseq."):
            assert importlib.import_module(module).eval is data.evaluate
    others = {f"{module}: {name}" for module, name, _ in found if name not in ("torch.load", "np.load")}
    assert {name for name in others if not re.fullmatch(r"fairseq\..*: eval", name)} == REASONS.keys()
    assert sum(name == "eval" for _, name, _ in found) > 30
