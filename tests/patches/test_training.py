"""Averages of weights over a training, and smoothed labels, are what their definitions say."""

import errno
import fcntl
import signal
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from fairseq import checkpoint_utils, options
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from fairseq.models import BaseFairseqModel
from fairseq.optim import AMPOptimizer, FP16Optimizer
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule
from fairseq.optim.sgd import SGD
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf
from support.command_server import shared
from support.small_text import training as flags_of
from support.small_text import write_text

from fairseq_fwp import patches
from fairseq_fwp.patches import training

DECAY, START = 0.75, 2
slow = partial(pytest.param, marks=pytest.mark.slow)
AVERAGE = ["--store-ema", "--ema-decay", DECAY, "--ema-start-update", START]
BIAS = "decoder.adaptive_softmax.bias"


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """A function train(folder, updates, *flags) -> the checkpoint of each update, of a tied model with FAVOR+."""
    data = write_text(tmp_path_factory.mktemp("text"))
    size = ["--decoder-layers", 1, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 16]
    size += ["--decoder-attention-heads", 2, "--favor-features", 4, "--tokens-per-sample", 16]
    flags = ["--task", "language_modeling", "--arch", "delta_favor_lm_wt103", *size, "--batch-size", 8]
    flags += ["--optimizer", "adam", "--lr", "0.05", "--save-interval-updates", 1, "--cpu", "--num-workers", 0]

    def train(folder, updates, *more):
        log = folder.with_suffix(".log")
        save = ["--save-dir", folder, "--max-update", updates]
        assert shared().run("fairseq-train", data, *flags, *save, *more, log=log) == 0, log.read_text()
        saved = sorted(folder.glob("checkpoint_1_*.pt"), key=lambda path: int(path.stem.split("_")[-1]))
        return [torch.load(path, weights_only=True) for path in saved]

    return train


def check_averages(checkpoints, mean):
    """Compare the averages of checkpoints with those of their weights, from the average before the first."""
    for number, checkpoint in enumerate(checkpoints, 1):
        weights, found = checkpoint["model"], checkpoint["extra_state"]["ema"]
        mean = {
            name: DECAY * mean[name] + (1 - DECAY) * x if number >= START and x.is_floating_point() else x
            for name, x in weights.items()
        }
        assert found.keys() == weights.keys()
        torch.testing.assert_close(found, mean)
        assert torch.equal(found["decoder.embed_tokens.weight"], found["decoder.adaptive_softmax.weight"])
    assert any("draws" in name for name in mean)  # a whole number


@pytest.mark.parametrize("flags", [[], *map(slow, (["--ema-fp32"], ["--ema-fp32", "--bf16"]))], ids=" ".join)
def test_averages_of_a_training(train, tmp_path, flags):
    train(tmp_path / "run", 2, *AVERAGE, *flags)
    checkpoints = train(tmp_path / "run", 4, *AVERAGE, *flags)
    assert len(checkpoints) == 4
    if "--bf16" not in flags:  # there, averages and weights are rounded
        check_averages(checkpoints, checkpoints[0]["model"])
    else:
        precise = checkpoints[3]["extra_state"]["ema_fp32_params"]
        assert torch.equal(precise["decoder.embed_tokens.weight"], precise["decoder.adaptive_softmax.weight"])


FP16 = ["--fp16", "--fp16-no-flatten-grads", "--fp16-init-scale", 4, "--fp16-scale-window", 4]
RESUMED = [["--bf16"], FP16, [*AVERAGE, "--ema-update-freq", 2]]
RESUMED += map(slow, (["--amp"], ["--memory-efficient-bf16"], [*FP16, "--memory-efficient-fp16"]))
RESUMED += map(slow, (["--bf16", "--arch", "kda_lm_wt103"], ["--bf16", "--arch", "fwp_fwl_lm", "--lr", 1e-3]))


@pytest.mark.parametrize("flags", RESUMED, ids=lambda flags: " ".join(map(str, flags)))
def test_a_resumed_training_has_all_its_numbers(train, tmp_path, flags):
    """Float32 copies of the weights, the scale of the loss, and averages."""
    flags = ["--arch", "delta_lm_wt103", *flags]
    for limit in (3, 7):
        resumed = train(tmp_path / "run", limit, *flags)[-1]
    whole = train(tmp_path / "whole", 7, *flags)[-1]
    for found, expected in (
        (resumed["model"], whole["model"]),
        (resumed["extra_state"].get("ema", {}), whole["extra_state"].get("ema", {})),
    ):
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert resumed["last_optimizer_state"].get("loss_scale") == whole["last_optimizer_state"].get("loss_scale")


def test_amp_computes_in_bfloat16_on_a_cpu(train, tmp_path):
    """A gradient is rounded, and close to float32's; weights and moments stay in float32."""

    def gradients(*flags):
        checkpoint = train(tmp_path / f"run{len(flags)}", 1, *flags)[0]
        assert {x.dtype for x in checkpoint["model"].values() if x.is_floating_point()} == {torch.float32}
        return [x["exp_avg"] for x in checkpoint["last_optimizer_state"]["state"].values()]

    exact, rounded = gradients(), gradients("--amp")
    errors = [((x - y).norm() / x.norm()).item() for x, y in zip(exact, rounded, strict=True) if x.norm() > 0]
    assert len(errors) > 8 and 1e-4 < max(errors) < 0.05


@pytest.mark.parametrize("amp", [True, False])
def test_any_model_computes_in_bfloat16_with_amp(amp):
    patches.apply()
    model, dtypes = BaseFairseqModel(), []
    model.layer = torch.nn.Linear(4, 3)
    optimizer = AMPOptimizer.build_optimizer(half_precision(), list(model.parameters()))

    def criterion(model, sample):
        y = model.layer(sample)
        dtypes.append(y.dtype)
        return y.float().sum(), 1, {}

    FairseqTask(None).train_step(torch.ones(2, 4), model, criterion, optimizer if amp else optimizer.fp32_optimizer, 0)
    assert dtypes == [torch.bfloat16 if amp else torch.float32]
    assert model.layer.weight.grad.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("flag", ["--bf16", "--amp"])
def test_slow_bfloat16_is_warned_of(monkeypatch, tmp_path, flag):
    processor = tmp_path / "cpuinfo"
    for flags, fast in (("fpu avx2 avx512f", False), ("fpu avx512_bf16", True), ("fp asimd bf16", True)):
        processor.write_text(f"flags : {flags}\n")
        assert training.has_bfloat16_products(processor) == fast
    assert training.has_bfloat16_products(tmp_path / "none")
    monkeypatch.setattr(training, "has_bfloat16_products", lambda: False)
    common = SimpleNamespace(bf16=flag == "--bf16", amp=flag == "--amp")
    trainer = SimpleNamespace(cfg=SimpleNamespace(common=common), cuda=False)
    with pytest.warns(UserWarning, match=f"{flag} makes a training slower here: .* Leave it out"):
        training.warn_of_slow_bfloat16(lambda trainer: None, trainer)
    trainer.cuda = True
    training.warn_of_slow_bfloat16(lambda trainer: None, trainer)


def half_precision(**settings):
    """Return the settings of fairseq's optimizers for half precision."""
    common = {"bf16": False, "fp16_scale_window": 3, "fp16_init_scale": 4, "min_loss_scale": 1e-4}
    common |= {"fp16_scale_tolerance": 0.0, "threshold_loss_scale": None, **settings}
    sgd = {"_name": "sgd", "lr": [0.1], "momentum": 0.0, "weight_decay": 0.0}
    return SimpleNamespace(common=SimpleNamespace(**common), optimizer=OmegaConf.create(sgd))


def test_flat_weights_are_resumed(monkeypatch):
    """Those of --fp16 on a GPU; a weight that is no longer their rounded one stays."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    precise = torch.tensor([1.0001, 2.0001, 3.0001])
    optimizers = [FP16Optimizer.build_optimizer(half_precision(), [torch.nn.Parameter(precise.half())]) for _ in "12"]
    optimizers[0].fp32_params[None].data.copy_(precise)
    optimizers[1].fp32_params[None].data[1] = 7
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert optimizers[1].fp32_params[None].tolist() == torch.tensor([1.0001, 7, 3.0001]).tolist()


def test_the_scale_of_the_loss_is_resumed():
    """PyTorch's, which is on only where there is a GPU."""

    def amp():
        found = AMPOptimizer.build_optimizer(half_precision(), [torch.nn.Parameter(torch.zeros(1))])
        found._grad_scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        return found

    def step(optimizer):
        optimizer.zero_grad()
        optimizer.backward(next(iter(optimizer.params)).sum())
        optimizer.step()
        return optimizer.scaler.get_scale()

    whole, resumed = amp(), amp()
    for scale in (4, 4):
        assert step(whole) == scale
    resumed.load_state_dict(whole.state_dict())
    assert [step(resumed) for _ in range(4)] == [step(whole) for _ in range(4)] == [8, 8, 8, 16]


@pytest.fixture(scope="module")
def start(train, tmp_path_factory):
    """A checkpoint without an average, of a model that cannot predict two words, as a converted one."""
    folder = tmp_path_factory.mktemp("start")
    (checkpoint,) = train(folder / "run", 1)
    checkpoint["model"][BIAS][[0, 1]] = -torch.inf
    torch.save(checkpoint, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


@pytest.mark.parametrize("flags", [["--ema-fp32"], slow([])], ids=" ".join)
def test_an_average_starts_from_the_weights_of_a_checkpoint(train, start, tmp_path, flags):
    checkpoints = train(tmp_path / "run", 3, "--finetune-from-model", start, *AVERAGE, *flags)
    check_averages(checkpoints, torch.load(start, weights_only=True)["model"])
    assert checkpoints[2]["extra_state"]["ema"][BIAS].isneginf().nonzero().flatten().tolist() == [0, 1]


def test_labels_are_smoothed_over_possible_words(train, start, tmp_path):
    """The loss is that of a vocabulary without the others; a model without words for them trains."""
    scores = torch.randn(6, 9, dtype=torch.float64)
    few, target = scores[:, 2:].log_softmax(-1), torch.tensor([2, 8, 3, 7, 3, 5])
    impossible = scores.index_fill(1, torch.tensor([0, 1]), -torch.inf).requires_grad_()
    for ignored, reduce in product((None, 3), (True, False)):
        expected = label_smoothed_nll_loss(few, target - 2, 0.1, ignored and ignored - 2, reduce)
        found = label_smoothed_nll_loss(impossible.log_softmax(-1), target, 0.1, ignored, reduce)
        torch.testing.assert_close(found, expected)
    found[0].sum().backward()
    assert impossible.grad.isfinite().all()
    flags = ["--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1, "--finetune-from-model", start]
    (checkpoint,) = train(tmp_path / "run", 1, *flags)
    assert all(x.isfinite().all() for name, x in checkpoint["model"].items() if name != BIAS)
    assert "loss=inf" not in (tmp_path / "run.log").read_text()


def test_a_resumed_training_counts_epochs_without_progress():
    """--lr-patience 2: with a resume at any epoch, saved before its step, the rates are those of one run."""
    losses = [5, 4, 4.5, 4.6, 4.7, 4.7, 4.8, 4.9, 3, 4]

    def plateau(rate):
        settings = {"lr": [rate], "momentum": 0.0, "weight_decay": 0.0, "lr_patience": 2, "lr_shrink": 0.5}
        settings |= {"lr_threshold": 1e-4, "warmup_updates": 0, "warmup_init_lr": -1}
        cfg = SimpleNamespace(**settings, maximize_best_checkpoint_metric=False)
        return ReduceLROnPlateauLRSchedule(cfg, SGD(cfg, [torch.nn.Parameter(torch.zeros(1))]))

    whole, rates, saved = plateau(1.2), [], []
    for epoch, loss in enumerate(losses, 1):
        saved.append((whole.optimizer.get_lr(), whole.state_dict()))
        rates.append(whole.step(epoch, loss))
    assert rates == [1.2] * 4 + [0.6] * 3 + [0.3] * 3
    for cut, (rate, state) in enumerate(saved):
        resumed = plateau(rate)
        resumed.load_state_dict(state)
        assert [resumed.step(cut + i, loss) for i, loss in enumerate(losses[cut:], 1)] == rates[cut:], cut


def test_a_resumed_training_counts_its_patience(train, tmp_path):
    """--patience 2 without progress ends after three validations, also of two runs; with 3 it goes on for one more."""
    folder, flags = tmp_path / "run", ["--arch", "delta_lm_wt103", "--lr", 0, "--patience"]
    updates = [len(train(folder, limit, *flags, patience)) for limit, patience in ((2, 2), (9, 2), (9, 2), (9, 3))]
    assert updates == [2, 3, 3, 4]
    log = (tmp_path / "run.log").read_text()
    assert log.count("training is finished with --patience 2, nothing is changed") == 1


def test_another_process_saves_the_same_file(tmp_path, monkeypatch):
    save, path = torch.save, tmp_path / "checkpoint.pt"

    def save_after_the_other(obj, file):
        monkeypatch.setattr(torch, "save", save)
        checkpoint_utils.torch_persistent_save({"other": 1}, str(path))
        save(obj, file)
        assert torch.load(path) == {"other": 1}

    monkeypatch.setattr(torch, "save", save_after_the_other)
    monkeypatch.setattr(training, "ATTEMPTS", 1)
    checkpoint_utils.torch_persistent_save({"own": 1}, str(path))
    assert torch.load(path) == {"own": 1} and list(tmp_path.iterdir()) == [path]
    (tmp_path / "file").touch()
    assert path.stat().st_mode == (tmp_path / "file").stat().st_mode


def begin(folder, no_save=False):
    """Begin a training in this process, as fairseq does."""
    checkpoint, first = SimpleNamespace(no_save=no_save, save_dir=str(folder)), SimpleNamespace(distributed_rank=0)
    training.train_alone(Mock(), None, SimpleNamespace(checkpoint=checkpoint, distributed_training=first))


@pytest.fixture
def commands(tmp_path):
    """A function commands(*flags) -> exit status of a training of one update in the folder save, and its output."""
    arguments = flags_of(write_text(tmp_path / "data"), tmp_path / "save", "samples", "--max-update", 1)

    def run(*flags, **how):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        return shared().run("fairseq-train", *arguments, *flags, log=log, **how), log.read_text()

    return run


def test_a_folder_has_one_training(commands, tmp_path):
    """Another one is refused at once, before it writes, unless it saves nothing."""
    (folder := tmp_path / "save").mkdir()

    def training_that_fails():
        begin(folder)
        begin(folder)  # the next one of this process
        sentence = f"--save-dir must be used by one training at a time, got {folder}, where another training runs"
        status, said = commands()
        assert status == 1 and said.splitlines()[-1] == f"{sentence}: give another, or wait for its end"
        assert not list(folder.iterdir())
        assert commands("--no-save")[0] == 0 and not list(folder.iterdir())
        raise KeyError

    with pytest.raises(KeyError):
        training.free_folder(training_that_fails)
    assert commands("--no-save", processes=2)[0] == 0
    assert commands(processes=2)[0] == 0 and (folder / "checkpoint_last.pt").exists()


def test_a_killed_training_frees_its_folder(commands):
    """Its workers, which have copies of what it has open, end some seconds later."""
    saving = ["--max-update", 9, "--save-interval-updates", 1]
    workers = ["--num-workers", 2, "--batch-size", 1, "--data-buffer-size", 1]
    assert commands(*saving, *workers, die_at="save 1")[0] == -signal.SIGKILL
    assert commands()[0] == 0


def test_a_trainer_takes_the_flags_of_old_versions(tmp_path):
    """A namespace, as fairseq's own constructor does."""
    parser, init = options.get_training_parser(), Mock()
    flags = [str(tmp_path), "--arch", "transformer_lm", "--task", "language_modeling", "--save-dir", str(tmp_path)]
    args = options.parse_args_and_arch(parser, flags)
    training.train_alone(init, None, args, "task")
    (_, cfg, task), _ = init.call_args
    assert cfg.checkpoint.save_dir == str(tmp_path) and task == "task"


def test_a_folder_without_locks(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with caplog.at_level("INFO"):
        begin(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} cannot be locked (No locks available): use it for one training at a time"
    ]
    begin(tmp_path, no_save=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [["--fp16"], ["--fp16", "--no-save"]], ids=" ".join)
def test_fp16_on_a_cpu_is_refused(commands, tmp_path, flags):
    """Before the training text is read, which is not there."""
    (tmp_path / "data" / "train.idx").unlink()
    status, said = commands(*flags)
    sentence = "--fp16 must be used on a GPU, got a CPU: give --bf16 in its place, or leave it out"
    assert (status, said.splitlines()[-1]) == (1, sentence)


@pytest.mark.parametrize(
    "gpu, cpu, processes, amp, sentence",
    [
        (False, False, 1, False, "must be used on a GPU, got a CPU: leave it out"),
        (True, True, 1, False, "must be used on a GPU, got a CPU: leave it out"),
        (True, False, 2, False, "must be used by one process, got 2: leave it out, or use one GPU"),
        (True, False, 1, True, "must be used without --amp, got both: give --bf16 in place of --amp"),
        (True, False, 1, False, None),
    ],
)
def test_graphs_are_refused_where_there_are_none(monkeypatch, gpu, cpu, processes, amp, sentence):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    cfg = SimpleNamespace(
        model=SimpleNamespace(cuda_graphs=True),
        common=SimpleNamespace(cpu=cpu, amp=amp, fp16=False),
        distributed_training=SimpleNamespace(distributed_world_size=processes),
    )
    init = Mock()
    if sentence:
        with pytest.raises(SystemExit) as raised:
            training.refuse_what_needs_a_gpu(init, None, cfg)
        assert str(raised.value) == f"--cuda-graphs {sentence}"
    else:
        training.refuse_what_needs_a_gpu(init, None, cfg)
    cfg.model.cuda_graphs = False
    training.refuse_what_needs_a_gpu(init, None, cfg)
    assert init.call_count == (1 if sentence else 2)
