"""Foreign files run no code: checkpoints, their configurations, paths, archives and settings."""

import ast
import functools
import hashlib
import importlib
import io
import os
import pickle
import subprocess
import sys
import tarfile
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import fairseq
import pytest
import torch
from fairseq import checkpoint_utils, file_utils, utils
from fairseq.data import Dictionary, FileAudioDataset, codedataset, data_utils
from fairseq.data.audio.data_cfg import S2TDataConfig
from fairseq.models.speech_to_text.hub_interface import S2THubInterface
from support.command_server import ROOT, shared
from support.pairwise import looped
from support.small_text import training, write_text

from fairseq_fwp.patches import checkpoints, data

NOT_RUN = r"got the code .*, which is not run"


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


@looped("place", ["model", "cfg", "extra_state"])
def test_objects_in_a_checkpoint_are_refused_with_what_trusts_them(tmp_path, canary, place):
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": {}, "cfg": {}, "args": None, "extra_state": {}, place: Touch(canary)}, path)
    sentence = r"checkpoint.pt holds pickled objects \(\S*system\), [^\n]* set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1$"
    with pytest.raises(RuntimeError, match=sentence):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


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


def shared_lists(depth):
    """Return lists in lists, each with many references to the next one: 50^depth places in a few kilobytes."""
    inner = []
    for _ in range(depth):
        inner = [inner] * 50
    return inner


def test_files_that_could_take_any_memory_are_refused(tmp_path):
    """And no others: an optimizer may keep a few places of one number, or indices, and lists may share parts."""
    path = tmp_path / "saved.pt"
    usual = {
        "model": {"w": torch.ones(1).expand(16)},
        "optimizer": [torch.zeros(1).expand(1000), torch.eye(3).to_sparse()],
    }
    torch.save(usual | {"shared": shared_lists(30)}, path)
    checkpoints.check_stored(path)
    for large in (torch.zeros(1).expand(2**30), [torch.zeros(1).expand(2**22) for _ in range(9)]):
        torch.save({"model": large}, path)
        with pytest.raises(ValueError, match=r"must hold a number for every place .*, in a file of [\d,]+ bytes$"):
            checkpoints.check_stored(path)
    torch.save({"model": torch.zeros(2**23)}, path)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    with pytest.raises(ValueError, match=r"a file of torch.save, got an archive of 33,\d+,\d+ bytes in \d+,\d+$"):
        checkpoints.check_stored(tmp_path / "packed.pt")


@looped("command", ["fairseq-eval-lm", "fairseq-generate", "fairseq-train", "fwp-eval-lm", "fwp-convert"])
def test_every_command_refuses_them(tmp_path, canary, command):
    path, text = tmp_path / "checkpoint.pt", write_text(tmp_path)
    torch.save({"model": Touch(canary), "cfg": None, "args": None}, path)
    convert = [path, "--source", "schlag-lm", "--out", tmp_path / "out", "--vocabulary", tmp_path / "dict.txt"]
    arguments = {
        "fairseq-generate": [text, "--path", path, "--task", "language_modeling"],
        "fairseq-train": training(text, tmp_path / "save", "samples", "--restore-file", path, "--max-update", 1),
        "fwp-convert": convert,
    }.get(command, [text, "--path", path])
    assert shared().run(command, *arguments, log=tmp_path / "log") != 0
    assert "pickled objects" in (tmp_path / "log").read_text().strip().splitlines()[-1]


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
    with pytest.raises(ValueError, match=rf"must be a number, .*, {NOT_RUN}"):
        checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "checkpoint.pt")])


def test_settings_mean_what_they_meant_and_code_is_refused():
    """Some options are evaluated twice, as --left-pad-source: fairseq expects a TypeError unless it is a string."""
    for text in ("[(512, 3)] * 2 + [(1, -2)]", "(0.9, 0.98)", "1e-3,2", " {'a': [True, None]}"):
        assert data.evaluate(text) == eval(text)
    assert utils.eval_str_list("1,2.5") == [1.0, 2.5] and utils.eval_str_list(0.5) == [0.5]
    assert utils.eval_bool("True") and utils.eval_bool(True, default=True)
    for text in ("print(1)", "a", "().__class__", "[x for x in 'ab']", "lambda: 1", "f'{1}'", "1 +", "{**a}"):
        with pytest.raises(ValueError, match=rf"{NOT_RUN}|must be a number, a string, a list or a dictionary of them"):
            data.evaluate(text)
    repeats = ("[0] * 400000000", "1000000000 * 'a'", "[[[0] * 999] * 999] * 999", "+".join(["[0] * 9999"] * 99))
    for text in (*repeats, "9" * 2**21):
        with pytest.raises(ValueError, match="must have at most 1,048,576 numbers and letters, got "):
            data.evaluate(text)
    with pytest.raises(TypeError, match="evaluate must be a string, got bool"):
        data.evaluate(True)


# Members of an archive; the second is the path of another folder.
OUTSIDE = [
    "../escaped.de-en.de",
    "{victim}/escaped.de-en.de",
    "a/../../escaped.de-en.de",
    "x.de-en.de/escaped.de-en.en",
]


def make_archive(path, victim, kind):
    """Write members outside the archive's folder, also through a link, and some inside."""
    names = [name.format(victim=victim) for name in [*OUTSIDE, "a/y.de-en.en"]]
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name in [*names[:3], "wikitext-103/wiki.train.tokens", "enwik8"]:
                archive.writestr(name, "x")
        return
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("x.de-en.de")
        link.type, link.linkname = tarfile.SYMTYPE, str(victim)
        archive.addfile(link)
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))


@looped("kind", ["zip", "tgz"])
def test_archives_of_recipes_unpack_nothing_outside_their_folder(tmp_path, kind):
    """A download with the right checksum."""
    tmp_path /= kind
    folder, victim, path = tmp_path / "out/download", tmp_path / "victim", tmp_path / "archive"
    for made in (folder, victim):
        made.mkdir(parents=True)
    make_archive(path, victim, kind)
    checksum, name = hashlib.sha256(path.read_bytes()).hexdigest(), f"a.{kind}"
    archive = f"Archive({name!r}, {checksum!r}, ({path.as_uri()!r},), ('*.de-en.??',))"
    program = f"from data.fetch import Archive, Path\n{archive}.fetch(Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT / "recipes" / "driver", capture_output=True, check=False)
    assert any(path.is_file() and path.name != name for path in folder.rglob("*"))
    assert not [path for path in tmp_path.rglob("*escaped*") if not path.is_relative_to(folder)]


@looped("name", [*OUTSIDE[:3], "link"])
def test_a_model_is_unpacked_inside_its_folder(tmp_path, name):
    victim, path = tmp_path / "victim", tmp_path / "model.tar.gz"
    victim.mkdir(exist_ok=True)
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


def test_files_of_data_are_no_code(tmp_path, canary):
    """A dictionary, a task's setting precompute_mask_config, a manifest, and a configuration."""
    code = f"__import__('pathlib').Path({str(canary)!r}).touch()"
    (tmp_path / "dict.txt").write_text(f"$(touch {canary}) 1\n`touch {canary}` 1\n")
    assert len(Dictionary.load(str(tmp_path / "dict.txt"))) == 6
    (tmp_path / "valid.tsv").write_text(f"{tmp_path}\n")
    with pytest.raises(ValueError, match=NOT_RUN):
        FileAudioDataset(tmp_path / "valid.tsv", 16000, feature_encoder_spec=code)
    (tmp_path / "train.txt").write_text(code)
    with pytest.raises(ValueError, match=NOT_RUN):
        codedataset.parse_manifest(tmp_path / "train.txt", Dictionary())
    for call in ("!!python/object/apply:os.system", "!!python/object/new:os.system"):
        (tmp_path / "config.yaml").write_text(f"{call} ['touch {canary}']\n")
        with pytest.raises(Exception, match=r"Failed to load config from (.|\n)*could not determine a constructor"):
            S2TDataConfig(tmp_path / "config.yaml")


def test_the_name_of_a_text_is_no_command(tmp_path, canary, monkeypatch):
    """fairseq takes the languages of a translation from names of files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.defpath)  # without the commands of an environment that is not activated, such as tqdm
    name = f"train.a-b;touch {canary.name};.a"
    (tmp_path / f"{name}.fasta").write_text(">one\nACG\nT\n>two\nGG\n")
    dataset = data_utils.load_indexed_dataset(name, Dictionary(), "fasta")
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


def test_every_evaluation_in_fairseq_is_ours_and_every_load_is_of_numbers():
    """fairseq's examples are plug-ins, and model overrides words of a command: only the user names them."""
    places = []
    for path in Path(fairseq.__file__).parent.rglob("*.py"):
        parts = path.relative_to(Path(fairseq.__file__).parents[1]).with_suffix("").parts
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings
            nodes = [] if parts[1] == "examples" else ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            name, module = ast.unparse(call.func), ".".join(parts).removesuffix(".__init__")
            if name in ("torch.load", "np.load"):  # without these arguments they load only tensors and numbers
                assert not {"pickle_module", "weights_only", "allow_pickle"} & {word.arg for word in call.keywords}
            elif name == "eval":
                assert importlib.import_module(module).eval is data.evaluate, module
                places.append(module)
    assert len(places) > 30
