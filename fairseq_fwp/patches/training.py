"""Training: averages, smoothed labels, files that are complete, and a resumed run that goes on where it ended."""

import contextlib
import logging
import math
import os
import shutil
import sys
import time
import warnings
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fairseq_fwp.outputs import lock, system_reason, unfinished
from fairseq_fwp.patches.hooks import SavesStates
from fairseq_fwp.patches.options import setting
from fairseq_fwp.patches.patch import patch

# Number of tries, as in fairseq, and seconds between them: network file systems fail for moments.
ATTEMPTS, PAUSE = 3, 2.5
BFLOAT16_PRODUCTS = {"avx512_bf16", "amx_bf16", "bf16"}  # as Linux names them, the last one on Arm
PLATEAU = "fairseq.optim.lr_scheduler.reduce_lr_on_plateau.ReduceLROnPlateauLRSchedule"
FP16 = "fairseq.optim.fp16_optimizer._FP16OptimizerMixin"
MEMORY_EFFICIENT = "fairseq.optim.fp16_optimizer._MemoryEfficientFP16OptimizerMixin"
OVERFLOWS = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")  # of fairseq's scaler
logger = logging.getLogger(__name__)
_lock = contextlib.ExitStack()  # of the --save-dir
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lock.close)  # workers may outlive a training that is killed


@patch("fairseq.tasks.fairseq_task.FairseqTask.train_step")
def autocast_on_a_cpu(train_step, self, sample, model, criterion, optimizer, *args, **kwargs):
    """Compute the loss in bfloat16 with --amp --cpu, where torch's autocast does: fairseq's --amp needs CUDA.

    Parameters, gradients and the optimizer stay in float32.
    """
    from fairseq.optim.amp_optimizer import AMPOptimizer  # only after the patches, without which it may fail

    if not isinstance(optimizer, AMPOptimizer) or next(model.parameters()).device.type != "cpu":
        return train_step(self, sample, model, criterion, optimizer, *args, **kwargs)

    def loss_in_bfloat16(model, sample):
        with torch.autocast("cpu", torch.bfloat16):
            return criterion(model, sample)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CUDA is not available")  # fairseq asks for autocast on a GPU
        return train_step(self, sample, model, loss_in_bfloat16, optimizer, *args, **kwargs)


@patch("fairseq.trainer.Trainer._build_optimizer")
def warn_of_slow_bfloat16(build, self):
    """Warn of --bf16 and --amp on a CPU without bfloat16 products, where a training takes longer with them."""
    common = self.cfg.common
    flag = "--bf16" if common.bf16 else "--amp" if common.amp else None
    if flag and not self.cuda and not has_bfloat16_products():
        reason = "this processor has no bfloat16 products, as AVX512-BF16 and AMX are"
        warnings.warn(f"{flag} makes a training slower here: {reason}. Leave it out.", stacklevel=2)
    build(self)


def has_bfloat16_products(described: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor multiplies matrices of bfloat16; True where Linux does not describe it."""
    try:
        return not BFLOAT16_PRODUCTS.isdisjoint(described.read_text(encoding="utf-8").split())
    except OSError:
        return True


@patch("fairseq.models.ema.ema.EMA._step_internal")
def average_each_tensor_once(step, self, new_model, updates=None):
    """Average each tensor once: fairseq's --store-ema averages tied weights twice, and fails for whole numbers."""
    averages, restored, averaged = self.fp32_params if self.config.ema_fp32 else self.model.state_dict(), {}, set()
    for name, x in new_model.state_dict().items():
        if not isinstance(x, Tensor) or "version" in name:
            continue
        mean = restored[name] = averages[name] if name in averages else averages.setdefault(name, x.clone())
        place = mean.data_ptr(), mean.shape, mean.stride()
        if place in averaged:
            continue
        averaged.add(place)
        # A decay of zero is a copy: in biases, 0 times minus infinity is not a number.
        if name in self.skip_keys or not mean.is_floating_point() or self.decay == 0:
            mean.copy_(x)
        else:
            mean.mul_(self.decay).add_(x.to(mean.dtype), alpha=1 - self.decay)
    self.restore(restored)


@patch("fairseq.trainer.Trainer.load_checkpoint")
def average_from_loaded_weights(load, self, *args, **kwargs):
    """Start an average from a checkpoint's weights: without an average in it, --store-ema finds them deleted.

    With --ema-update-freq, its next step is where it would have been, as the checkpoint does not hold the count.
    """
    settings = self.cfg.ema
    wanted, settings.store_ema = settings.store_ema, False
    try:
        extra_state = load(self, *args, **kwargs)
    finally:
        settings.store_ema = wanted
    if wanted and extra_state is not None:
        saved = extra_state.get("ema") or self.get_model().state_dict()
        self.ema.restore(saved)
        if settings.ema_fp32:
            self.ema.build_fp32_params(extra_state.get("ema_fp32_params", saved))
        self.ema.update_freq_counter = self.get_num_updates() % settings.ema_update_freq
    return extra_state


@patch("fairseq.criterions.label_smoothed_cross_entropy.label_smoothed_nll_loss")
def smooth_over_possible_words(loss_of, lprobs, target, epsilon, ignore_index=None, reduce=True):
    """Smooth labels over words with a probability: over all words, one without makes fairseq's loss infinite.

    Over the other words it is the loss of the same model with a vocabulary that lacks these words.
    """
    loss, nll_loss = loss_of(lprobs, target, epsilon, ignore_index, reduce)
    if loss.isfinite().all():
        return loss, nll_loss
    _, nll_loss = loss_of(lprobs, target, 0, ignore_index, reduce=False)
    possible = lprobs.isneginf().logical_not()
    share = epsilon / (possible.sum(-1) - 1).clamp(min=1).view_as(nll_loss)
    others = -torch.where(possible, lprobs, 0).sum(-1).view_as(nll_loss)
    if ignore_index is not None:
        others = others.masked_fill(target.view_as(nll_loss) == ignore_index, 0)
    loss = (1 - epsilon - share) * nll_loss + share * others
    return (loss.sum(), nll_loss.sum()) if reduce else (loss, nll_loss)


@patch(f"{FP16}.state_dict")
def save_precise_weights(state_dict, self):
    """Save the float32 weights that --bf16 and --fp16 train: fairseq saves them rounded, and resumes from those."""
    return {**state_dict(self), "fp32_params": [x.data for x in _float32(self)]}


@patch(f"{FP16}.load_state_dict")
def load_precise_weights(load_state_dict, self, saved, *args, **kwargs):
    """Load the float32 weights that --bf16 and --fp16 train: fairseq resumes from rounded ones.

    A weight of the model that is not a rounded one, as in an average of checkpoints, stays.
    """
    load_state_dict(self, saved, *args, **kwargs)
    rounded = self.fp16_params[0].dtype
    for x, precise in zip(_float32(self), saved.get("fp32_params", ())):  # noqa: B905  (none in earlier checkpoints)
        x.data = torch.where(precise.to(x.device, rounded) == x, precise.to(x.device), x)


def _float32(optimizer: Any) -> list[Tensor]:
    """Return the float32 weights of an optimizer for half precision: of each parameter, or flat ones by device."""
    weights = optimizer.fp32_params
    return list(weights.values() if isinstance(weights, dict) else weights)


@patch("fairseq.optim.amp_optimizer.AMPOptimizer.state_dict")
@patch(f"{MEMORY_EFFICIENT}.state_dict")
@patch(f"{FP16}.state_dict")
def save_overflows(state_dict, self):
    """Save when --fp16 and --amp change the scale of the loss next: fairseq does not, and resumes with other scales."""
    scaler = self.scaler
    if hasattr(scaler, "state_dict"):  # PyTorch's, of --amp
        overflows = scaler.state_dict()
    else:  # fairseq's, whose settings are flags; none with --bf16
        overflows = {name: value for name, value in vars(scaler or object).items() if name in OVERFLOWS}
    return {**state_dict(self), "overflows": overflows}


@patch("fairseq.optim.amp_optimizer.AMPOptimizer.load_state_dict")
@patch(f"{MEMORY_EFFICIENT}.load_state_dict")
@patch(f"{FP16}.load_state_dict")
def load_overflows(load_state_dict, self, saved, *args, **kwargs):
    """Load when --fp16 and --amp change the scale of the loss next: fairseq does not, and resumes with other scales."""
    load_state_dict(self, saved, *args, **kwargs)
    overflows, scaler = saved.get("overflows"), self.scaler
    if overflows and hasattr(scaler, "load_state_dict"):
        scaler.load_state_dict(overflows)
    elif overflows and scaler is not None:
        vars(scaler).update(overflows)


@patch("fairseq.checkpoint_utils.save_checkpoint")
def save_for_every_process(save_checkpoint, cfg, trainer, epoch_itr, *args, **kwargs):
    """Collect the states of streams in all processes: fairseq asks only the first what a checkpoint must hold."""
    if isinstance(epoch_itr, SavesStates):
        epoch_itr.collect_states(trainer.data_parallel_process_group)
    return save_checkpoint(cfg, trainer, epoch_itr, *args, **kwargs)


@patch("fairseq.checkpoint_utils.load_checkpoint")
def step_after_validation(load, cfg, trainer, **kwargs):
    """Make a step of reduce_lr_on_plateau that a checkpoint lacks: fairseq saves before it, and resumes without it."""
    extra_state, batches = load(cfg, trainer, **kwargs)
    if extra_state is not None and trainer.get_num_updates() and not cfg.reset_lr_scheduler:
        ended = extra_state["train_iterator"].get("iterations_in_epoch") == 0
        if ended and extra_state.get("val_loss") is not None:
            trainer.lr_step(extra_state["train_iterator"]["epoch"] - 1, extra_state["val_loss"])
    return extra_state, batches


@patch(f"{PLATEAU}.state_dict")
def save_bad_epochs(state_dict, self):
    """Save the epochs without progress, which --lr-patience of reduce_lr_on_plateau counts: fairseq does not."""
    return {**state_dict(self), "num_bad_epochs": self.lr_scheduler.num_bad_epochs}


@patch(f"{PLATEAU}.load_state_dict")
def load_bad_epochs(load_state_dict, self, saved):
    """Load the epochs without progress, which --lr-patience of reduce_lr_on_plateau counts: fairseq does not."""
    load_state_dict(self, saved)
    self.lr_scheduler.num_bad_epochs = saved.get("num_bad_epochs", 0)


@patch("fairseq.trainer.Trainer.save_checkpoint")
def save_patience(save, self, filename, extra_state):
    """Save the validations without progress, which --patience counts: fairseq does not."""
    return save(self, filename, {**extra_state, "patience": dict(_patience())})


@patch("fairseq.checkpoint_utils.load_checkpoint")
def load_patience(load, cfg, trainer, **kwargs):
    """Load the validations without progress, which --patience counts: fairseq does not."""
    extra_state, batches = load(cfg, trainer, **kwargs)
    counts = _patience()
    counts.clear()  # of another training of this process
    if trainer.get_num_updates() and not (cfg.reset_optimizer or cfg.reset_meters):
        counts.update(extra_state.get("patience", {}))
    return extra_state, batches


@patch("fairseq.checkpoint_utils.load_checkpoint")
def end_what_is_finished(load, cfg, trainer, **kwargs):
    """End a finished training that is started again: fairseq looks at the limits only after one more update."""
    extra_state, batches = load(cfg, trainer, **kwargs)
    if not trainer.get_num_updates():  # a new training from the weights of another one, whose hours do not count
        trainer._previous_training_time = 0
    limits = trainer.cfg.optimization
    for flag, reached, limit in (
        ("--max-update", trainer.get_num_updates(), limits.max_update),
        ("--max-epoch", batches.next_epoch_idx - 1, limits.max_epoch),
        ("--stop-time-hours", trainer._previous_training_time / 3600, limits.stop_time_hours),
        ("--patience", _patience().get("num_runs", 0), cfg.patience),
    ):
        if 0 < (limit or 0) <= reached:
            logger.info(f"training is finished with {flag} {limit}, nothing is changed: a larger value trains on")
            return extra_state, SimpleNamespace(next_epoch_idx=math.nan)  # no epoch, so that none begins
    return extra_state, batches


def _patience() -> dict[str, Any]:
    """Return the counts of fairseq's early stop, which are attributes of its function."""
    from fairseq_cli.train import should_stop_early

    return vars(should_stop_early)


@patch("fairseq.checkpoint_utils.torch_persistent_save")
def save_whole(save, obj, filename, async_write=False):
    """Write a complete file or none: fairseq appends a retry to the incomplete file, and leaves both on the disk."""
    from fairseq.file_io import PathManager

    if async_write or PathManager.path_requires_pathmanager(filename):
        return save(obj, filename, async_write)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with unfinished(Path(filename)) as work, work.open("wb") as file:
                torch.save(obj, file)
                file.flush()
                os.fsync(file.fileno())
            return None
        except (OSError, RuntimeError) as error:
            if attempt == ATTEMPTS:
                raise _not_saved(filename, error) from error
            time.sleep(PAUSE)
    return None


@patch("fairseq.file_io.PathManager.copy")
def copy_whole(copy, src_path, dst_path, overwrite=False):
    """Replace a file by a complete copy: a run that is killed while fairseq copies cannot be resumed."""
    from fairseq.file_io import PathManager

    if any(map(PathManager.path_requires_pathmanager, (src_path, dst_path))):
        return copy(src_path, dst_path, overwrite)
    try:
        with unfinished(Path(dst_path)) as work:
            shutil.copyfile(src_path, work)
    except OSError as error:
        raise _not_saved(dst_path, error) from error
    return True


@patch("fairseq.distributed.utils.call_main")
def make_folder_of_log(call_main, cfg, main, **kwargs):
    """Make the folder of --log-file: fairseq opens the file before it makes the folder of --save-dir."""
    if log := getattr(cfg.common, "log_file", None):
        os.makedirs(os.path.dirname(os.path.abspath(log)), exist_ok=True)
    return call_main(cfg, main, **kwargs)


@patch("fairseq.trainer.Trainer.__init__")
def train_alone(init, self, cfg, *args, **kwargs):
    """Refuse a second training in one --save-dir, while the first runs: fairseq mixes their checkpoints and states."""
    from fairseq.distributed.utils import is_master

    cfg = _as_configuration(cfg)
    _lock.close()  # of an earlier training in this process
    if is_master(cfg.distributed_training) and not cfg.checkpoint.no_save:
        _lock_folder(cfg.checkpoint.save_dir)
    init(self, cfg, *args, **kwargs)


@patch("fairseq.distributed.utils.call_main")
def free_folder(call_main, *args, **kwargs):
    """Let another training have the --save-dir after the end of one, in a process that goes on."""
    with _lock:
        return call_main(*args, **kwargs)


@patch("fairseq.trainer.Trainer.__init__")
def refuse_what_needs_a_gpu(init, self, cfg, *args, **kwargs):
    """Refuse --fp16 and --cuda-graphs without a GPU: fairseq fails only after reading the data, or ignores our flag."""
    cfg = _as_configuration(cfg)
    common, processes = cfg.common, cfg.distributed_training.distributed_world_size
    flat = common.fp16 and not (common.memory_efficient_fp16 or common.fp16_no_flatten_grads)
    on_a_cpu, graphs = common.cpu or not torch.cuda.is_available(), setting(cfg.model, "cuda_graphs", False)
    if flat and on_a_cpu:
        sys.exit("--fp16 must be used on a GPU, got a CPU: give --bf16 in its place, or leave it out")
    if graphs and on_a_cpu:
        sys.exit("--cuda-graphs must be used on a GPU, got a CPU: leave it out")
    if graphs and processes > 1:
        sys.exit(f"--cuda-graphs must be used by one process, got {processes}: leave it out, or use one GPU")
    if graphs and common.amp:
        sys.exit("--cuda-graphs must be used without --amp, got both: give --bf16 in place of --amp")
    init(self, cfg, *args, **kwargs)


def _as_configuration(cfg: Any) -> Any:
    """Return fairseq's configuration of a training, which a trainer may also get as the flags of old versions."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    return convert_namespace_to_omegaconf(cfg) if isinstance(cfg, Namespace) else cfg


def _lock_folder(folder: str) -> None:
    """Lock a folder until `_lock` is closed or this process ends; where there are no locks, the log says so."""
    try:
        lock(Path(folder), _lock)
    except BlockingIOError:
        _lock.close()
        got = f"got {folder}, where another training runs: give another, or wait for its end"
        sys.exit(f"--save-dir must be used by one training at a time, {got}")
    except (ImportError, OSError) as error:
        logger.info("%s cannot be locked (%s): use it for one training at a time", folder, system_reason(error))


def _not_saved(path: str, error: BaseException) -> OSError:
    return OSError(
        f"{path} could not be saved ({system_reason(error)}); earlier checkpoints are complete. Free some space or "
        "give another --save-dir, and run the same command to resume"
    )
